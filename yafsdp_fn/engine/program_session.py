"""The session that walks a program: what the user's loss visits must be what the program expects, in its order.

start                 gather what is missing                          | ops of the program
a visit's compute     the op at the cursor, which must be that one    | Forward or Backward
then                  issue what comes next, up to the next compute   | Gather, Reduce, ..., Norm, Update
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from yafsdp_fn.comm.lookout import Sight
from yafsdp_fn.engine import leaf_gradients, refusals
from yafsdp_fn.engine.building import Verified
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.session import Session, Step
from yafsdp_fn.schedules.further_ops import AllReduce
from yafsdp_fn.schedules.ops import Backward, ComputeOp, Forward, Gather, Norm, Update
from yafsdp_fn.schedules.split import Kind
from yafsdp_fn.schedules.trace import Visit

NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


class ProgramSession(Session):
    """Walks a program, one op after the other. Between two computes it issues all that comes between them."""

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
        self.unmeasured = verified.unmeasured
        self.slots.reserve_for(self.program)
        if verified.has_carry_slots and self.slots.carries is None and self.plugs.carries is not None:
            self.slots.carries = self.plugs.carries(memory, self.slots.number)
        self.interpreter = self.new_interpreter()
        self._cursor = 0

    def start(self) -> None:
        """Gathers what slots should hold from the step before and do not; then what comes before the first visit."""
        missing = self.slots.missing()
        for index, (unit, slot) in enumerate(missing):
            self.interpreter.issue(Gather((unit,), (slot,)), NOT_THERE, number=index - len(missing))
        self._issue_ahead()

    def plan(self, kind: Kind, visit: Visit) -> ComputeOp:
        trace, ops = self.program
        op = ops[self._cursor] if self._cursor < len(ops) else None
        if isinstance(op, Forward if kind == "forward" else Backward):
            planned = trace.visits[op.visit]
            same = planned.units == visit.units and planned.trained == visit.trained
            if same and (op.visit, op.microbatch) == (visit.id, self.microbatch):
                return op
        raise refusals.unlike_the_program(self.place, op, trace)

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        self._cursor += 1
        self._issue_ahead()

    def sight(self) -> Sight:
        return Sight(self.place, self._cursor, self.program)

    def _issue_ahead(self, ending: bool = False) -> None:
        """Executes the program up to its next compute; the norm and updates after the last one only when `ending`."""
        ops = self.program.ops
        while self._cursor < len(ops):
            op = ops[self._cursor]
            if isinstance(op, Forward | Backward):
                return
            if not isinstance(op, Norm | Update):
                self.interpreter.issue(op)
            elif self._cursor > self.verified.last_compute and not ending:
                return  # gradients that reach leaves themselves are known when the whole backward is over
            else:
                self.optimize(op)
            self._cursor += 1

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        if self.verified.updates_early and any(grad is not None for grad in leaf_grads):
            raise RuntimeError(f"{leaf_gradients.LATE}. Units were updated already: load a checkpoint into a new state")
        super().end_backward(leaf_grads)

    def to_sum(self) -> set[int]:
        left = self.program.ops[self._cursor :]
        return {unit for op in left if isinstance(op, AllReduce) for unit in op.units}

    def finish(self) -> None:
        self._issue_ahead(ending=True)
        if self._cursor < len(self.program.ops):
            raise refusals.ended_early(self.program.ops[self._cursor], self.program.trace)
        if self.plugs.updates is not None:
            self.optimize_all(self.verified.tail)
