"""A session without a program: the first step, and visits without grad inside a training step.

    forward of v:    gather missing units; run the block and keep nothing
    backward of v:   gather missing units again; run and differentiate the block; reduce, except units whose gradient
                     an earlier visit of the microbatch will add to, on a deterministic mesh

Nothing has proved what is issued here, so ranks compare every op before they issue it.
"""

from collections import Counter
from collections.abc import Callable

from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Reduce
from yafsdp_fn.program.program import after_program
from yafsdp_fn.program.split import Kind
from yafsdp_fn.program.trace import Trace, Visit, chained_order
from yafsdp_fn.runtime.memory import Memory
from yafsdp_fn.runtime.session import Session, Step


class OnDemand(Session):
    """Issues the ops of each visit at the visit."""

    def __init__(self, memory: Memory, step: Step, beside: Callable[[], Session] | None = None) -> None:
        super().__init__(memory, step, None, beside)
        self.slots.bound.clear()  # ops of another loss may bear the same numbers
        self._held: dict[int, int] = {}  # weight slot -> unit
        self._left: Counter[int] = Counter()  # unit -> visits of the microbatch that have yet to add to its gradient
        self._together: set[int] = set()  # units whose visits in a microbatch are reduced as one

    def start(self) -> None:
        """Does nothing: each visit gathers what it needs."""

    def plan(self, kind: Kind, visit: Visit, microbatch: int) -> ComputeOp:
        """Gathers missing units, into slots that depend on the unit and its position in the visit."""
        units = self.memory.units
        slots = []
        for position, unit in enumerate(visit.units):
            stacked = units[unit].stack is not None
            slots.append(2 * position + units[unit].layer % 2 if stacked else 2 * len(units) + unit)
        for unit, slot in zip(visit.units, slots, strict=True):
            if self._held.get(slot) != unit:
                self.slots.reserve(
                    {slot: units[unit].gather_bytes} if unit not in self.memory.weights_alias else {}, {}
                )
                self.interpreter.issue(Gather((unit,), (slot,)))
                self._held[slot] = unit
        if kind == "forward":
            return Forward(visit.id, tuple(slots), keep=False, microbatch=microbatch)
        own = {unit: 2 * len(units) + unit for unit in self._together}
        grad_slots = tuple(own.get(unit, slots[visit.units.index(unit)]) for unit in visit.trained)
        for unit, slot in zip(visit.trained, grad_slots, strict=True):
            self.slots.reserve({}, {slot: units[unit].reduce_bytes} if unit not in self.memory.grads_alias else {})
        return Backward(visit.id, tuple(slots), grad_slots, microbatch=microbatch)

    def follow(self, op: ComputeOp | None = None, visit: Visit | None = None, *, ending: bool = False) -> None:
        if isinstance(op, Backward) and visit is not None:
            for unit, slot in zip(visit.trained, op.grad_slots, strict=True):
                self._left[unit] -= 1
                if unit not in self._together or not self._left[unit]:
                    self.interpreter.issue(Reduce((unit,), (slot,)))

    def end_forward(self) -> None:
        super().end_forward()
        self._left = Counter(unit for visit in self.visits for unit in visit.trained)
        if self.memory.comms.deterministic:
            self._together = {unit for unit, times in self._left.items() if times > 1}

    def trace(self) -> Trace:
        """Returns the trace of the recorded visits."""
        visits = tuple(self.first_visits)
        order = chained_order(visits, self.microbatches, backward=self.differentiates)
        found = Trace(self.memory.units, visits, order, self.memory.mesh_axes, self.microbatches)
        return found if self.collectives is None else self.collectives.listed(found)

    def finish(self) -> None:
        if (updates := self.step_hooks.updates) is not None:
            self.optimize_all(after_program(self.memory.trained, updates.lent))

    def to_sum(self) -> set[int]:
        """Returns no unit: all gradients are summed over replicas here, together."""
        if self.memory.comms.replicas > 1:
            self.interpreter.issue(AllReduce(tuple(sorted(self.interpreter.touched))))
        return set()
