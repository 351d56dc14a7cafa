"""Visits that recompute as work on static memory, which a lever may capture and replay.

    work(tensors) -> outs        beside its arguments it reads weight slots and writes gradient slots, which do not move

What tells two such works of one block apart: forward or backward, which gradients are asked for and given, and which
gradient slots are added to.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.gradients import Place
from yafsdp_fn.engine.protocols import Outs
from yafsdp_fn.schedules.ops import Backward, ComputeOp, Forward

VisitWork = Callable[[Sequence[Tensor]], Outs]
"""One run of a block: arguments -> outputs, or gradients; beside them it reads and writes slots alone."""


class StaticVisits:
    """`Replays` (engine/protocols.py) by `run`."""

    def run(
        self,
        call: BlockCall,
        what: Hashable,
        memory: Sequence[Tensor],
        work: VisitWork,
        tensors: Sequence[Tensor],
        *,
        pure: bool,
    ) -> Outs:
        """`work(tensors)`, in whatever way.

        what: tells different works of one call apart; memory: the slots that it reads and the memory that it writes, as
        flat views; pure: whether it writes none, so that it may be run once more
        """
        raise NotImplementedError

    def outputs(self, visit: Any, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        def work(tensors: Sequence[Tensor]) -> Outs:
            return [*visit.outputs(op, tensors)]

        outs = self.run(visit.call, "forward", _slots(visit, op), work, tensors, pure=True)
        return [out for out in outs if out is not None]

    def gradients(
        self,
        visit: Any,
        op: Backward,
        places: Sequence[Place],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Outs:
        given = [grad is not None for grad in grads]

        def work(both: Sequence[Tensor]) -> Outs:
            left = iter(both[len(needs) :])
            return list(
                visit.gradients(op, places, both[: len(needs)], needs, [next(left) if g else None for g in given])
            )

        trained = tuple(unit in visit.visit.trained for unit in visit.visit.units)
        what = (tuple(needs), tuple(given), trained, tuple(place.add for place in places))
        both = [*tensors, *(grad for grad in grads if grad is not None)]
        # products of another dtype go through scratch: made in the first step, on demand, if there are any
        written = [*(place.views.flat for place in places), *visit.session.memory.scratches]
        return self.run(visit.call, what, [*_slots(visit, op), *written], work, both, pure=False)


def _slots(visit: Any, op: ComputeOp) -> list[Tensor]:
    """The weights that a visit reads, flat."""
    slots, units = visit.session.slots, visit.visit.units
    return [slots.weight(slot, unit)[0] for slot, unit in zip(op.slots, units, strict=True)]
