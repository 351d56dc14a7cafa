"""A session: one execution of a step, beside the user's Python.

    with compute(visit):      # the op that the visit is now; wait for what it needs
        run the block
                              # then issue what may follow, up to the next compute

`ProgramSession` walks a program: what the user's loss visits must be what the program expects, in its order. Without a
program, in the first step, `OnDemand` issues what each visit needs (on_demand.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from yafsdp_fn.comm.lookout import Sight
from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.halves import Later
from yafsdp_fn.engine.interpreter import SAME_VISITS, Interpreter
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.programs import LEAVES_COME_LATE, Verified
from yafsdp_fn.engine.protocols import NOTHING, CarrySlots, Plugs
from yafsdp_fn.engine.shards import Shards
from yafsdp_fn.engine.slots import acquire
from yafsdp_fn.schedules.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Norm, Op, Update
from yafsdp_fn.schedules.split import Kind
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.trace import Trace, Visit, chained_order
from yafsdp_fn.schedules.updating import after_program

SAME_ORDER = (
    "A loss must visit the same units in the same order at every step and in every microbatch; make another step "
    "function for another order"
)

NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


NOT_BESIDE = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): on a deterministic mesh their gradient "
    "would be added up in another order at another number of ranks. Visit them (ya.apply, ya.scan)"
)


class OrderChanged(RuntimeError):
    """A step visits other units, or in another order, than the program it runs."""


class _Root(torch.autograd.Function):
    """The first token. It hangs on the leaves, too: a gradient with respect to them inside a loss must reach the
    visits, which refuse it; else it would silently leave them out."""

    @staticmethod
    def forward(ctx: Any, leaf_token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.leaves = len(leaves)
        return leaf_token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.leaves


class Step(NamedTuple):
    """What is executed.

    number: of the step; grads: where reductions add up, None where no unit is trained
    differentiates: whether there is a backward; microbatches: how often the loss is called
    watch: look for tensors that reach blocks from outside (the first step of a loss)
    checked: ranks make sure before each collective that they issue the same one; plugs: what the step runs with
    """

    number: int
    grads: Shards | None = None
    differentiates: bool = False
    microbatches: int = 1
    watch: bool = False
    checked: bool = False
    plugs: Plugs = NOTHING


class Session:
    """What sessions have in common: the visits of a microbatch, chained by a token; leaves; failures.

    beside: makes the session for visits without grad in a training step
    planned: whether it runs a program; staged: of one stage of a pipeline; unmeasured: whether updates come without a
    norm before them
    """

    planned = False
    staged = False
    unmeasured = False

    def __init__(self, memory: Memory, step: Step, beside: "Callable[[], Session] | None" = None) -> None:
        memory.comms.check()
        memory.ready()
        self.memory = memory
        self.step, self.grads, self.differentiates, self.microbatches, self.watch, self.checked, self.plugs = step
        self.slots = acquire(memory, self.planned)
        self.microbatch = 0
        self.visits: list[Visit] = []  # of the current microbatch
        self.closed = False
        self.differentiating = False  # whether the step's own backward runs
        self.uses_leaves = False  # whether the loss reads sharded leaves beside visits
        self.place = f"before the first visit of step {self.step}"
        self._make_beside = beside
        self._beside: Session | None = None
        self._recorded: list[Visit] = []
        self._trained: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._failure: tuple[str, BaseException] | None = None
        self.later: dict[tuple[int, int], Later] = {}  # (visit, microbatch) between the halves of its backward
        self.leaf_token = torch.zeros((), device=memory.comms.device, requires_grad=self.differentiates)
        self.token = self.leaf_token
        self.leaves = [
            master.detach().requires_grad_(self.grads is not None and group.trainable)
            for group, master in zip(memory.groups, memory.masters(), strict=True)
        ]

    # ---- what a session on demand and one of a program do differently

    interpreter: Interpreter

    def start(self) -> None:
        """Issues what comes before the first visit."""

    def plan(self, kind: Kind, visit: Visit) -> ComputeOp:
        """The op that this compute is."""
        raise NotImplementedError

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        """Issues what may follow."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is left: the optimizer's step, if there is one."""
        if (updates := self.plugs.updates) is not None:
            for op in after_program(self.memory.trained, updates.lent):
                self.follow_up(op)

    # ---- the step, as `steps` drives it

    def sight(self) -> Sight:
        """Where it is, for who looks from another thread."""
        return Sight(self.place)

    def begin_microbatch(self, microbatch: int) -> None:
        self.microbatch, self.visits = microbatch, []
        if self._beside is not None:
            self._beside.microbatch, self._beside.visits = microbatch, []
        self.token = _Root.apply(self.leaf_token, *self.leaves)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """While the step's own backward runs; any other backward through a visit is refused."""
        self.differentiating = True
        try:
            yield
        finally:
            self.differentiating = False

    def for_no_grad(self) -> "Session":
        """The session that visits without grad run in: of a training step, one beside it, with slots of its own."""
        if self._make_beside is None:
            return self
        if self._beside is None:
            self._beside = self._make_beside()
        return self._beside

    def end_forward(self) -> None:
        """Every microbatch must visit the same units."""
        if self.microbatch == 0:
            self._recorded = self.visits
        elif self.visits != self._recorded:
            pairs = itertools.zip_longest(self._recorded, self.visits)
            names = next([v.name if v else "nothing" for v in pair] for pair in pairs if pair[0] != pair[1])
            raise OrderChanged(
                f"microbatch {self.microbatch} visits {names[1]} where microbatch 0 visits {names[0]}. {SAME_ORDER}"
            )

    def trace(self) -> Trace:
        """What was visited."""
        visits = tuple(self._recorded)
        order = chained_order(visits, self.microbatches, backward=self.differentiates)
        return Trace(self.memory.units, visits, order, self.memory.mesh_axes, self.microbatches)

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """All computes are over. Untouched gradients are zero; `leaf_grads`, per group, are added."""
        self.must_be_sound()
        self.place = f"the end of step {self.step}"
        self.uses_leaves = any(grad is not None for grad in leaf_grads)
        if self.checked:
            self.memory.comms.must_agree(SAME_VISITS, {"op": self.place}, self.place)
        if self.uses_leaves and self.memory.comms.deterministic:
            raise RuntimeError(NOT_BESIDE)
        if self._beside is not None:
            self._beside.end_backward(())
        if self.grads is None:
            return
        to_sum = self.to_sum()
        with torch.no_grad(), self.memory.using([], [("grad shard", unit) for unit in self.grads.rows]):
            self.interpreter.zero_untouched(self.grads.rows)
            for group, extra in zip(self.memory.groups, leaf_grads, strict=True):
                if extra is not None:
                    # where an op will sum over replicas it takes this rank's part, else the whole
                    whole = Shards([group], [self.memory.comms.sum_over_replicas(extra.contiguous())])
                    for unit, row in Shards([group], [extra]).rows.items():
                        self.grads.rows[unit].add_(row if unit in to_sum else whole.rows[unit])

    def to_sum(self) -> set[int]:
        """The units whose gradient an op will still sum over replicas."""
        return set()

    def follow_up(self, op: Op) -> None:
        """An op that is no compute of a visit."""
        if not isinstance(op, Norm | Update):
            self.interpreter.issue(op)
            return
        updates = self.plugs.updates
        assert updates is not None, "norms and updates are of steps that have an optimizer"
        self.place = f"the {'metrics' if isinstance(op, Norm) else 'update'} of step {self.step}"
        self.interpreter.run(op, updates.norm if isinstance(op, Norm) else partial(updates.update, *op))

    def close(self) -> None:
        """The step is over, and went well."""
        if self._beside is not None:
            self._beside.close()
        self.closed = True
        self.token = self.leaf_token
        if self.planned or not self.differentiates:
            self.slots.release(self.planned)
        else:  # slots on demand of a training step are not kept: from the second step on a program has its own
            self.memory.board.forget_set(self.slots.number)

    def abort(self, error: BaseException) -> None:
        """After an exception: lets the streams run dry. Where all ranks failed here, the state stays usable."""
        if self.closed:
            return
        self.closed = True  # its slots are dropped, not given back: what they hold is of no use
        # cycles through the autograd graph and through a traceback, which the collector cannot see or sees late
        self.token, self._failure = self.leaf_token, None
        if self._beside is not None:
            self._beside.closed = True
        self.memory.comms.abort(self.place, error)
        self.memory.board.clear()

    # ---- visits, as `visit` drives them

    def elsewhere(self, call: BlockCall) -> bool:
        """Whether another stage runs the visit that now begins. Where this one does, its arguments have arrived."""
        return False

    def stand_ins(self, call: BlockCall) -> Sequence[Tensor]:
        """What stands for the outputs of a visit that is elsewhere."""
        raise NotImplementedError

    def new_visit(self, name: str, units: tuple[int, ...]) -> Visit:
        """A visit of this microbatch begins. Raises RuntimeError inside of another one: a block that visits would visit
        again in every recomputation."""
        if self._failure is not None:
            self.must_be_sound()
        if self.interpreter.inside is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self.microbatch}, step {self.step})"
            raise RuntimeError(
                f"forward of {here} begins inside {self.interpreter.inside}: a block cannot visit sharded parameters; "
                "visit them beside it, or give them to the block (a pytree of units to ya.apply, two stacks to ya.scan)"
            )
        trained = self._trained.get(units)
        if trained is None:
            specs = self.memory.units
            trained = tuple([unit for unit in units if self.grads is not None and specs[unit].trainable])
            self._trained[units] = trained
        self.visits.append(Visit(len(self.visits), name, units, trained))
        return self.visits[-1]

    @property
    def carries(self) -> CarrySlots:
        found: Any = self.slots.carries
        assert found is not None, "carry slots are a lever: steps plug it in where a program has some"
        return cast(CarrySlots, found)

    @contextmanager
    def compute(self, kind: Kind, visit: Visit, microbatch: int) -> Iterator[ComputeOp]:
        """Issues and waits for what a compute needs; issues what may follow when the block ends."""
        if self._failure is not None:
            self.must_be_sound()
        self.place = f"{kind} of {visit.name} (visit {visit.id}, microbatch {microbatch}, step {self.step})"
        op = self.plan(kind, visit)
        try:
            self.interpreter.begin(op, visit, self.place)
            yield op
        except BaseException as error:
            self._failure = (self.place, error)
            raise
        finally:
            self.interpreter.end()
        self.follow(op, visit)

    def must_be_sound(self) -> None:
        if self._failure is not None:
            place, error = self._failure
            raise RuntimeError(
                f"{place} raised {type(error).__name__}, and the loss went on: a step cannot continue after a failed "
                "visit; let the exception out of the loss"
            ) from error


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
        self.unmeasured = verified.has_updates and not verified.has_norm
        self.slots.reserve_for(self.program)
        if verified.has_carry_slots and self.slots.carries is None and self.plugs.carries is not None:
            self.slots.carries = self.plugs.carries(memory, self.slots.number)
        self.interpreter = Interpreter(
            memory,
            self.slots,
            self.grads,
            step=self.step,
            checked=self.checked,
            observer=self.plugs.observer,
            works=None if self.slots.carries is None else self.slots.carries.works(),
            updates=self.plugs.updates,
        )
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
        wanted = "has ended" if op is None else f"expects {describe(op, trace).partition(' in slot')[0]} here"
        raise OrderChanged(f"{self.place}: the program {wanted}. {SAME_ORDER}")

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
            if isinstance(op, Norm | Update) and self._cursor > self.verified.last_compute and not ending:
                return  # gradients that reach leaves themselves are known when the whole backward is over
            self.follow_up(op)
            self._cursor += 1

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        if self.verified.updates_early and any(grad is not None for grad in leaf_grads):
            raise RuntimeError(f"{LEAVES_COME_LATE}. Units were updated already: load a checkpoint into a new state")
        super().end_backward(leaf_grads)

    def to_sum(self) -> set[int]:
        left = self.program.ops[self._cursor :]
        return {unit for op in left if isinstance(op, AllReduce) for unit in op.units}

    def finish(self) -> None:
        self._issue_ahead(ending=True)
        if self._cursor < len(self.program.ops):
            missing = describe(self.program.ops[self._cursor], self.program.trace)
            raise OrderChanged(f"the step ended, but its program goes on with {missing}. {SAME_ORDER}")
        if not self.verified.has_updates:
            super().finish()
