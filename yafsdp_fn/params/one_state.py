"""Tells ranks that use different states, or steps of one, where no shape shows it: a student and a teacher in a set.

    a step, an evaluation        a number of the state and its step, in the sum of its metrics
    unshard, global_norm, ...    the same in words, compared on the host

States are numbered as they are made on a mesh. On CUDA nobody waits for the sum of a step: it is read at the end of a
later one, when it has arrived.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.communication.agreement import RanksDisagree
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.util.randomness import ranks_around
from yafsdp_fn.util.torch_private import transforms_active

NUMBERS = 1 << 20
"""Numbers of a state and its step: their squares add up exactly in float64 over 8,192 ranks."""

WHICH = "which state they use (numbered as they were made; a set, say, has no order that ranks share)"


class Unread(NamedTuple):
    """The sums of an earlier step, on their way to the host. own: what this rank used, in words"""

    arrived: Any
    sums: Tensor
    own: str


def words(number: int, step: int) -> str:
    return f"state {number}, step {step}"


def states_of(found: Sequence[Sharded]) -> str:
    """Returns the states that handles are of, or are sharded like, and their steps, in words."""
    origins = [handle.origin for handle in found]
    return "; ".join(dict.fromkeys(words(getattr(of.owner, "number", 0), of.step) for of in origins))


def must_be_one(what: str, found: Sequence[Sharded]) -> None:
    """Raises RanksDisagree unless all ranks use the same states for `what`. Collective, on the host; nothing in a step,
    whose end tells, in a trace, which one rank may make alone, and under transforms."""
    comms = found[0].owner.comms if found else None
    if isinstance(comms, Communicators) and ranks_around() is None and not transforms_active():
        comms.check()
        comms.must_agree(WHICH, {what: states_of(found)}, f"{what}, which all ranks call")


def marks(own: str, device: torch.device) -> Tensor:
    """Returns two elements that join the sum of a step's metrics: a number of the state in use, and its square."""
    number = float(zlib.crc32(own.encode()) % NUMBERS)
    return torch.full((2,), number, dtype=torch.float64, device=device).cumprod(0)


def check(sums: Tensor, own: str, comms: Communicators) -> None:
    """Raises RanksDisagree unless the `marks` of all ranks, of which these are the sums, are equal."""
    # on a CPU the sums are there
    if comms.device.type == "cpu":
        if _apart(sums, comms):
            comms.must_agree(WHICH, {"a step, or an evaluation,": own})
        return
    # on a GPU the host does not wait: it looks at those of an earlier step, if they have come
    unread = comms.unread
    if unread is None:
        unread = Unread(comms.event(), torch.empty(2, dtype=torch.float64, device="cpu", pin_memory=True), own)
    elif not unread.arrived.query():
        return
    elif _apart(unread.sums, comms):
        raise RanksDisagree(
            f"ranks disagree on {WHICH}: rank {comms.world_rank} has used {unread.own}, others have not"
        )
    comms.unread = unread._replace(own=own)
    unread.sums.copy_(sums, non_blocking=True)
    unread.arrived.complete()


def _apart(sums: Tensor, comms: Communicators) -> bool:
    """Returns whether ranks have different numbers: their squares are then larger than if all had the mean."""
    total, squares = sums.tolist()
    return bool(total * total != squares * comms.world)
