"""Sessions: one that walks a program, and one on demand, for the first step and for visits without grad."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from yafsdp_fn.dist.watchdog import RankPosition
from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Norm, Reduce, Update
from yafsdp_fn.program.program import after_program
from yafsdp_fn.program.split import Kind
from yafsdp_fn.program.trace import Trace, Visit, chained_order
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.building import Verified
from yafsdp_fn.runtime.memory import LATE, Memory
from yafsdp_fn.runtime.session import Session, Step

# ---- Sessions without a program: the first step, and visits without grad inside a training step.
#
#     forward of v:    gather missing units; run the block and keep nothing
#     backward of v:   gather missing units again; run and differentiate the block; reduce, except units whose gradient
#                      an earlier visit of the microbatch will add to, on a deterministic mesh
#
# Nothing has proved what is issued here, so ranks compare every op before they issue it.


class OnDemand(Session):
    """Issues the ops of each visit at the visit."""

    def __init__(self, memory: Memory, step: Step, beside: Callable[[], Session] | None = None) -> None:
        super().__init__(memory, step, beside)
        self.slots.bound.clear()  # ops of another loss may bear the same numbers
        self.interpreter = self.new_interpreter()
        self._held: dict[int, int] = {}  # weight slot -> unit
        self._left: Counter[int] = Counter()  # unit -> visits of the microbatch that have yet to add to its gradient
        self._together: set[int] = set()  # units whose visits in a microbatch are reduced as one

    def plan(self, kind: Kind, visit: Visit) -> ComputeOp:
        """Gathers missing units, into slots that depend on the unit and its position in the visit."""
        units = self.memory.units
        slots = []
        for position, unit in enumerate(visit.units):
            stacked = units[unit].stack is not None
            slots.append(2 * position + units[unit].layer % 2 if stacked else 2 * len(units) + unit)
        for unit, slot in zip(visit.units, slots, strict=True):
            if self._held.get(slot) != unit:
                self.slots.reserve({slot: units[unit].gather_bytes}, {})
                self.interpreter.issue(Gather((unit,), (slot,)))
                self._held[slot] = unit
        if kind == "forward":
            return Forward(visit.id, tuple(slots), keep=False, microbatch=self.microbatch)
        own = {unit: 2 * len(units) + unit for unit in self._together}
        grad_slots = tuple(own.get(unit, slots[visit.units.index(unit)]) for unit in visit.trained)
        for unit, slot in zip(visit.trained, grad_slots, strict=True):
            self.slots.reserve({}, {slot: units[unit].reduce_bytes})
        return Backward(visit.id, tuple(slots), grad_slots, microbatch=self.microbatch)

    def end_forward(self) -> None:
        super().end_forward()
        self._left = Counter(unit for visit in self.visits for unit in visit.trained)
        if self.memory.comms.deterministic:
            self._together = {unit for unit, times in self._left.items() if times > 1}

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        if isinstance(op, Backward):
            for unit, slot in zip(visit.trained, op.grad_slots, strict=True):
                self._left[unit] -= 1
                if unit not in self._together or not self._left[unit]:
                    self.interpreter.issue(Reduce((unit,), (slot,)))

    def trace(self) -> Trace:
        """Returns the trace of the recorded visits."""
        visits = tuple(self.first_visits)
        order = chained_order(visits, self.microbatches, backward=self.differentiates)
        return Trace(self.memory.units, visits, order, self.memory.mesh_axes, self.microbatches)

    def finish(self) -> None:
        if (updates := self.step_hooks.updates) is not None:
            self.optimize_all(after_program(self.memory.trained, updates.lent))

    def to_sum(self) -> set[int]:
        """Returns no unit: all gradients are summed over replicas here, together."""
        if self.memory.comms.replicas > 1:
            self.interpreter.issue(AllReduce(tuple(sorted(self.interpreter.touched))))
        return set()


# ---- The session that follows a program: the user's loss must make the visits that the program expects, in its
# order.
#
# start                 gather what is missing                          | ops of the program a visit's compute
# must be the op at the cursor                    | Forward or Backward then                  issue what comes next,
# up to the next compute   | Gather, Reduce, ..., Norm, Update

NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


class ProgramSession(Session):
    """Follows a program op by op. At each compute it issues everything up to the next one."""

    planned = True

    def __init__(
        self,
        verified: Verified,
        memory: Memory,
        step: Step,
        beside: Callable[[], Session] | None = None,
    ) -> None:
        super().__init__(memory, step, beside)
        self.verified, self.program = verified, verified.program
        self.ops = verified.ops
        self.unmeasured = verified.unmeasured
        self.slots.reserve_for(self.program)
        if verified.has_carry_slots and self.slots.carries is None and self.step_hooks.carries is not None:
            self.slots.carries = self.step_hooks.carries(memory, self.slots.number)
        self.interpreter = self.new_interpreter()
        self._cursor = 0

    def start(self) -> None:
        """Gathers units that slots should hold from the step before and do not; then issues the ops before the first
        visit."""
        missing = self.slots.missing()
        for index, (unit, slot) in enumerate(missing):
            self.interpreter.issue(Gather((unit,), (slot,)), NOT_THERE, number=index - len(missing))
        self._issue_ahead()

    def plan(self, kind: Kind, visit: Visit) -> ComputeOp:
        trace, ops = self.program.trace, self.ops
        op = ops[self._cursor] if self._cursor < len(ops) else None
        if isinstance(op, Forward if kind == "forward" else Backward):
            planned = trace.visits[op.visit]
            same = planned.units == visit.units and planned.trained == visit.trained
            if same and (op.visit, op.microbatch) == (visit.id, self.microbatch):
                return op
        raise errors.visit_differs_from_program(self.place, op, trace)

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        self._cursor += 1
        self._issue_ahead()

    def sight(self) -> RankPosition:
        return RankPosition(self.place, self._cursor, self.program)

    def _issue_ahead(self, ending: bool = False) -> None:
        """Executes the program up to its next compute; the norm and updates after the last one only when `ending`."""
        ops = self.ops
        while self._cursor < len(ops):
            op = ops[self._cursor]
            if isinstance(op, Forward | Backward):
                return
            if not isinstance(op, Norm | Update):
                self.interpreter.issue(op)
            elif self._cursor > self.verified.last_compute and not ending:
                return  # gradients of leaves read outside visits are known only after the whole backward
            else:
                self.optimize(op)
            self._cursor += 1

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        if self.verified.updates_early and any(grad is not None for grad in leaf_grads):
            raise RuntimeError(f"{LATE}. Units were updated already: load a checkpoint into a new state")
        super().end_backward(leaf_grads)

    def has_visited_all(self) -> bool:
        ops = self.ops[self._cursor :]
        return not (ops and isinstance(ops[0], Forward) and ops[0].microbatch == self.microbatch)

    def to_sum(self) -> set[int]:
        left = self.ops[self._cursor :]
        return {unit for op in left if isinstance(op, AllReduce) for unit in op.units}

    def finish(self) -> None:
        self._issue_ahead(ending=True)
        if self._cursor < len(self.ops):
            raise errors.step_ended_early(self.ops[self._cursor], self.program.trace)
        if self.step_hooks.updates is not None:
            self.optimize_all(self.verified.tail)
