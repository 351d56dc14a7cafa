"""The errors that a caller may want to catch."""

from yafsdp_fn.api.checksum import Corrupted
from yafsdp_fn.api.launch import RankFailed
from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.streams import CommunicationError
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.runtime.errors import OrderChanged

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "Corrupted",
    "DoesNotFit",
    "OrderChanged",
    "RankFailed",
    "RanksDisagree",
    "Refused",
]
