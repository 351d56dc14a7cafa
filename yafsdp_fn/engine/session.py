"""A session: one execution of a step, beside the user's Python.

    with compute(visit):      # the op that the visit is now; wait for what it needs
        run the block
                              # then issue what may follow, up to the next compute

This is what all sessions have in common. One walks a program (program_session.py); without one, in the first step,
another issues what each visit needs (on_demand.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from yafsdp_fn.comm.lookout import Sight
from yafsdp_fn.engine import leaf_gradients, refusals
from yafsdp_fn.engine.halves import Later
from yafsdp_fn.engine.interpreter import SAME_VISITS, Interpreter
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.protocols import NOTHING, CarrySlots, Plugs
from yafsdp_fn.engine.shards import Shards
from yafsdp_fn.engine.slots import acquire
from yafsdp_fn.schedules.ops import ComputeOp, Norm, Op, Update
from yafsdp_fn.schedules.split import Kind
from yafsdp_fn.schedules.trace import Visit


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
    planned: whether it runs a program; unmeasured: whether updates come without a norm before them
    """

    planned = False
    unmeasured = False

    def __init__(self, memory: Memory, step: Step, beside: "Callable[[], Session] | None" = None) -> None:
        memory.comms.check()
        memory.ready()
        self.memory = memory
        self.number, self.grads, self.differentiates, self.microbatches, self.watch, self.checked, self.plugs = step
        self.slots = acquire(memory, self.planned)
        self.replays = self.plugs.replays if self.planned else None  # before, slots are no static memory
        self.microbatch = 0
        self.visits: list[Visit] = []  # of the current microbatch
        self.closed = False
        self.differentiating = False  # whether the step's own backward runs
        self.uses_leaves = False  # whether the loss reads sharded leaves beside visits
        self.place = f"before the first visit of step {self.number}"
        self._make_beside = beside
        self._beside: Session | None = None
        self.first_visits: list[Visit] = []  # of the first microbatch
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
        raise NotImplementedError

    def to_sum(self) -> set[int]:
        """The units whose gradient an op will still sum over replicas."""
        return set()

    def new_interpreter(self) -> Interpreter:
        """When its slots are ready."""
        return Interpreter(self.memory, self.slots, self.grads, self.plugs, step=self.number, checked=self.checked)

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
            self.first_visits = self.visits
        elif self.visits != self.first_visits:
            raise refusals.unlike_the_first(self.microbatch, self.visits, self.first_visits)

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """All computes are over. Untouched gradients are zero; `leaf_grads`, per group, are added."""
        self.must_be_sound()
        self.place = f"the end of step {self.number}"
        self.uses_leaves = any(grad is not None for grad in leaf_grads)
        if self.checked:
            self.memory.comms.must_agree(SAME_VISITS, {"op": self.place}, self.place)
        if self.uses_leaves and self.memory.comms.deterministic:
            raise RuntimeError(leaf_gradients.ORDERED)
        if self._beside is not None:
            self._beside.end_backward(())
        if self.grads is None:
            return
        to_sum = self.to_sum()
        with torch.no_grad(), self.memory.using([], [("grad shard", unit) for unit in self.grads.rows]):
            self.interpreter.zero_untouched(self.grads.rows)
            if self.uses_leaves:
                leaf_gradients.add(self.memory, self.grads, leaf_grads, to_sum)

    def optimize(self, op: Norm | Update) -> None:
        """The norm of the gradient, or the optimizer's step on some units."""
        updates = self.plugs.updates
        assert updates is not None, "norms and updates are of steps that have an optimizer"
        self.place = f"the {'metrics' if isinstance(op, Norm) else 'update'} of step {self.number}"
        self.interpreter.run(op, updates.norm if isinstance(op, Norm) else partial(updates.update, *op))

    def optimize_all(self, ops: Iterable[Op]) -> None:
        """All that the optimizer does, after the program: its exchanges, too."""
        for op in ops:
            if isinstance(op, Norm | Update):
                self.optimize(op)
            else:
                self.interpreter.issue(op)

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

    def new_visit(self, name: str, units: tuple[int, ...]) -> Visit:
        """A visit of this microbatch begins."""
        if self._failure is not None:
            self.must_be_sound()
        if self.interpreter.inside is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self.microbatch}, step {self.number})"
            raise refusals.inside_another(here, self.interpreter.inside)
        trained = self._trained.get(units)
        if trained is None:
            specs = self.memory.units
            trained = tuple([unit for unit in units if self.grads is not None and specs[unit].trainable])
            self._trained[units] = trained
        self.visits.append(Visit(len(self.visits), name, units, trained))
        return self.visits[-1]

    @property
    def carries(self) -> CarrySlots:
        return cast(CarrySlots, self.slots.carries)  # a lever: steps plug it in where a program has some

    @contextmanager
    def compute(self, kind: Kind, visit: Visit, microbatch: int) -> Iterator[ComputeOp]:
        """Issues and waits for what a compute needs; issues what may follow when the block ends."""
        if self._failure is not None:
            self.must_be_sound()
        self.place = f"{kind} of {visit.name} (visit {visit.id}, microbatch {microbatch}, step {self.number})"
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
            raise refusals.after_failure(*self._failure) from self._failure[1]
