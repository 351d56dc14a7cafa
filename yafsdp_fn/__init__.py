"""yafsdp_fn: sharded training of stacked models as functions, with the schedule as data."""

from typing import Any

from yafsdp_fn import optim, schedules
from yafsdp_fn.algebra import global_norm, normal_like, vdot
from yafsdp_fn.batch import shard_batch
from yafsdp_fn.checksum import Corrupted, checksum
from yafsdp_fn.chunk import chunk
from yafsdp_fn.comm.agreement import RanksDisagree
from yafsdp_fn.comm.streams import CommunicationError
from yafsdp_fn.cross_entropy import linear_cross_entropy
from yafsdp_fn.engine.refusals import OrderChanged
from yafsdp_fn.functionalize import functionalize
from yafsdp_fn.linear import embedding, linear
from yafsdp_fn.load_into import load_into
from yafsdp_fn.lora import lora, merge_lora
from yafsdp_fn.low_rank import LowRank
from yafsdp_fn.map_layers import map_layers
from yafsdp_fn.mesh import mesh
from yafsdp_fn.named_weights import named_weights
from yafsdp_fn.objective import objective
from yafsdp_fn.params import initializers
from yafsdp_fn.params.leaf_mask import leaf_mask
from yafsdp_fn.params.markers import Pinned, Stacked, Unit, frozen, strip
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.sources import Lazy, materialize
from yafsdp_fn.params.tree import Param, names
from yafsdp_fn.plain_state import PlainState
from yafsdp_fn.planner import Cluster, DoesNotFit, memory, plan, search, simulate, trace
from yafsdp_fn.reductions import Max, Mean, Sum
from yafsdp_fn.scan import apply, scan
from yafsdp_fn.schedules import Assignment, Pipeline, Program, Refused, assign, remat, verify
from yafsdp_fn.sharding import init, shard, unshard
from yafsdp_fn.state import ShardedState
from yafsdp_fn.timeline import Timeline, compare, record
from yafsdp_fn.train_step import train_step
from yafsdp_fn.transform import eval_step, grad, value_and_grad

_LATE = {  # what takes its time to import, or what most people never need
    "calibrate": "yafsdp_fn.lab.calibrate",
    "checkpoint": "yafsdp_fn.checkpoint",
    "emulate": "yafsdp_fn.lab.emulated",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_LATE[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted(__all__)


# fmt: off
__all__ = [
    "Assignment", "Cluster", "CommunicationError", "Corrupted", "DoesNotFit", "Lazy", "LowRank", "Max", "Mean",
    "OrderChanged", "Param", "Pinned", "Pipeline", "PlainState", "Precision", "Program", "RanksDisagree", "Refused",
    "Sharded", "ShardedState", "Stacked", "Sum", "Timeline", "Unit", "apply", "assign", "calibrate", "checkpoint",
    "checksum", "chunk", "compare", "embedding", "emulate", "eval_step", "frozen", "functionalize", "global_norm",
    "grad", "init", "initializers", "leaf_mask", "linear", "linear_cross_entropy", "load_into", "lora",
    "map_layers", "materialize", "memory", "merge_lora", "mesh", "named_weights", "names", "normal_like",
    "objective", "optim", "plan", "record", "remat", "scan", "schedules", "search", "shard", "shard_batch",
    "simulate", "strip", "trace", "train_step", "unshard", "value_and_grad", "vdot", "verify",
]
# fmt: on
