"""A session: one execution of a step, beside the user's Python.

    with compute(visit):      # wait for what the visit's op needs
        run the block
                              # then issue what may follow, up to the next compute

This base class is common to all sessions. Both kinds are in program_session.py: one follows a program; `OnDemand`, in
the first step, issues what each visit needs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from yafsdp_fn.dist.watchdog import RankPosition
from yafsdp_fn.program.ops import ComputeOp, Norm, Op, Update
from yafsdp_fn.program.split import Kind
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.gradients import Later
from yafsdp_fn.runtime.interpreter import SAME_VISITS, Interpreter
from yafsdp_fn.runtime.memory import ORDERED, Memory, Shards, add
from yafsdp_fn.runtime.protocols import NOTHING, ActivationBuffers, StepHooks
from yafsdp_fn.runtime.slots import acquire


class _Root(torch.autograd.Function):
    """Makes the first token. It depends on the leaves, so that a gradient with respect to them inside a loss reaches
    the visits, which refuse it; else it would silently leave them out."""

    @staticmethod
    def forward(ctx: Any, leaf_token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.leaves = len(leaves)
        return leaf_token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.leaves


class Step(NamedTuple):
    """The settings of one step.

    number: of the step; grads: gradient shards, None if no unit is trained
    differentiates: there is a backward; microbatches: calls of the loss
    watch: look for tensors that reach blocks from outside (the first step of a loss)
    checked: ranks compare each collective before they issue it; step_hooks: the hooks of the step
    """

    number: int
    grads: Shards | None = None
    differentiates: bool = False
    microbatches: int = 1
    watch: bool = False
    checked: bool = False
    step_hooks: StepHooks = NOTHING


class Session:
    """Base of sessions: the visits of a microbatch, chained by a token; leaves; failures.

    beside: makes the session for visits without grad in a training step
    planned: it runs a program; unmeasured: updates come without a norm before them
    """

    planned = False
    unmeasured = False

    def __init__(self, memory: Memory, step: Step, beside: "Callable[[], Session] | None" = None) -> None:
        memory.comms.check()
        memory.ready()
        self.memory, self.blocks = memory, memory.comms.blocks
        self.number, self.grads, self.differentiates, self.microbatches, self.watch, self.checked, self.step_hooks = (
            step
        )
        self.slots = acquire(memory, self.planned)
        self.replays = self.step_hooks.replays if self.planned else None  # without a program slots are no static memory
        self.microbatch = 0
        self.visits: list[Visit] = []  # of the current microbatch
        self.closed = False
        self.differentiating = False  # the step's own backward is running
        self.uses_leaves = False  # the loss reads sharded leaves outside visits
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

    # ---- overridden by sessions on demand and of programs

    interpreter: Interpreter

    def start(self) -> None:
        """Issues the ops before the first visit."""

    def plan(self, kind: Kind, visit: Visit) -> ComputeOp:
        """Returns the op of this compute."""
        raise NotImplementedError

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        """Issues the ops that may follow."""
        raise NotImplementedError

    def has_visited_all(self) -> bool:
        """Returns whether the forward of the microbatch may end here; if not, an error is to come."""
        return True

    def finish(self) -> None:
        """Runs what is left: the optimizer's step, if there is one."""
        raise NotImplementedError

    def to_sum(self) -> set[int]:
        """Returns the units whose gradient an op will still sum over replicas."""
        return set()

    def new_interpreter(self) -> Interpreter:
        """Makes the interpreter, once the slots are ready."""
        return Interpreter(self.memory, self.slots, self.grads, self.step_hooks, step=self.number, checked=self.checked)

    # ---- the step, as `steps` drives it

    def sight(self) -> RankPosition:
        """Returns the position in the step, for the watchdog's thread."""
        return RankPosition(self.place)

    def begin_microbatch(self, microbatch: int) -> None:
        self.microbatch, self.visits = microbatch, []
        if self._beside is not None:
            self._beside.microbatch, self._beside.visits = microbatch, []
        self.token = _Root.apply(self.leaf_token, *self.leaves)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Marks the step's own backward; any other backward through a visit is refused."""
        self.differentiating = True
        try:
            yield
        finally:
            self.differentiating = False

    def for_no_grad(self) -> "Session":
        """Returns the session for visits without grad: in a training step, a second one with slots of its own."""
        if self._make_beside is None:
            return self
        if self._beside is None:
            self._beside = self._make_beside()
        return self._beside

    def end_forward(self) -> None:
        """Checks that every microbatch visits the same units. In a first step ranks compare the blocks that ran."""
        if self.microbatch == 0:
            self.first_visits = self.visits
            if self.blocks is not None and self.has_visited_all():
                place = f"the end of the forward of step {self.number}"
                if self.checked:
                    self.memory.comms.must_agree(SAME_VISITS, {"op": place}, place)
                self.blocks.compare()
                self.blocks = None
        elif self.visits != self.first_visits:
            raise errors.visits_differ_from_first(self.microbatch, self.visits, self.first_visits)

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """Ends all computes. Untouched gradients are zeroed; `leaf_grads`, per group, are added."""
        self.raise_failure()
        self.place = f"the end of step {self.number}"
        self.uses_leaves = any(grad is not None for grad in leaf_grads)
        if self.checked:
            self.memory.comms.must_agree(SAME_VISITS, {"op": self.place}, self.place)
        if self.uses_leaves and self.memory.comms.deterministic:
            raise RuntimeError(ORDERED)
        if self._beside is not None:
            self._beside.end_backward(())
        if self.grads is None:
            return
        to_sum = self.to_sum()
        with torch.no_grad(), self.memory.using([], [("grad shard", unit) for unit in self.grads.rows]):
            self.interpreter.zero_untouched(self.grads.rows)
            if self.uses_leaves:
                add(self.memory, self.grads, leaf_grads, to_sum)

    def optimize(self, op: Norm | Update) -> None:
        """Computes the norm of the gradient, or the optimizer's step on some units."""
        updates = self.step_hooks.updates
        assert updates is not None, "norms and updates are of steps that have an optimizer"
        self.place = f"the {'metrics' if isinstance(op, Norm) else 'update'} of step {self.number}"
        self.interpreter.run(op, updates.norm if isinstance(op, Norm) else partial(updates.update, *op))

    def optimize_all(self, ops: Iterable[Op]) -> None:
        """Runs all ops of the optimizer after the program, its exchanges included."""
        for op in ops:
            if isinstance(op, Norm | Update):
                self.optimize(op)
            else:
                self.interpreter.issue(op)

    def close(self) -> None:
        """Ends a successful step."""
        if self._beside is not None:
            self._beside.close()
        self.closed = True
        self.token = self.leaf_token
        if self.planned or not self.differentiates:
            self.slots.release(self.planned)
        else:  # slots on demand of a training step are not kept: from the second step on a program has its own
            self.memory.board.forget_set(self.slots.number)

    def abort(self, error: BaseException) -> None:
        """Lets the streams run dry after an exception. If all ranks failed here, the state stays usable."""
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
        """Begins a visit of this microbatch."""
        if self._failure is not None:
            self.raise_failure()
        if self.interpreter.inside is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self.microbatch}, step {self.number})"
            raise errors.nested_visit(here, self.interpreter.inside)
        trained = self._trained.get(units)
        if trained is None:
            specs = self.memory.units
            trained = tuple([unit for unit in units if self.grads is not None and specs[unit].trainable])
            self._trained[units] = trained
        self.visits.append(Visit(len(self.visits), name, units, trained))
        return self.visits[-1]

    @property
    def carries(self) -> ActivationBuffers:
        return cast(ActivationBuffers, self.slots.carries)  # set by a hook if the program has activation buffers

    @contextmanager
    def compute(self, kind: Kind, visit: Visit, microbatch: int) -> Iterator[ComputeOp]:
        """Issues a compute's op and waits until it may run; after the block, issues what may follow."""
        if self._failure is not None:
            self.raise_failure()
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
        self.place = f"after {self.place}"

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise errors.after_failure(*self._failure) from self._failure[1]
