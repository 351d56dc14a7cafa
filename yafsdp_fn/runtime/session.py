"""A session: one execution of a step, beside the user's Python, which follows a program op by op.

    start                 gather what is missing               | ops of the program
    a visit's compute     must be the op at the cursor         | Forward or Backward
    then                  issue what comes next, up to the     | Gather, Reduce, ..., Norm, Update
                          next compute

The user's loss must make the visits that the program expects, in its order. Visits without grad in a training step are
in no program: they take the pure path, as all visits do while a first call is recorded (recording.py). In a pipeline
the program is one stage's: what arrives for a call of a segment is taken from carry slots when it begins, and what
leaves it is put there when it ends (stage_io.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.dist.watchdog import RankPosition
from yafsdp_fn.nn.linear import Later
from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Norm, Op, Update, kind_of
from yafsdp_fn.program.split import Call, Kind
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors, pure
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.interpreter import Interpreter, acquire
from yafsdp_fn.runtime.memory import Memory, Shards
from yafsdp_fn.runtime.programs import Verified
from yafsdp_fn.runtime.protocols import NOTHING, StepHooks


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


class Visits:
    """The visits of a loss under way, one after the other: of a step (`Session`), or of a call that is recorded.

    number: of the step; differentiates: there is a backward; trains: weights of the state get gradients
    place: where this rank is, in words; leaves: by group, what the loss gets, rank's shards
    collectives: follows what blocks and the loss communicate (block_collectives.py); None without axes inside blocks
    """

    def __init__(self, memory: Memory, number: int, *, differentiates: bool, trains: bool) -> None:
        self.memory, self.number, self.differentiates = memory, number, differentiates
        self.microbatch = 0
        self.visits: list[Visit] = []  # of the current microbatch
        self.closed = False
        self.place = f"before the first visit of step {number}"
        self.collectives: Any = None
        self._trained = frozenset(unit for unit, spec in enumerate(memory.units) if trains and spec.trainable)
        self._failure: tuple[str, BaseException] | None = None
        self._running: Any = None  # the visit under way
        self.leaf_token = torch.zeros((), device=memory.comms.device, requires_grad=differentiates)
        self.token = self.leaf_token
        self.leaves = [
            master.detach().requires_grad_(trains and group.trainable)
            for group, master in zip(memory.groups, memory.masters(), strict=True)
        ]

    def begin(self, call: Call) -> dict[int, list[Tensor]]:
        """Begins a call of the loss, or its backward. Returns what arrives for it, by flow: nothing without stages."""
        self.microbatch = call.microbatch
        if call.kind == "forward":
            self.visits = []
            self.token = _Root.apply(self.leaf_token, *self.leaves)  # type: ignore[no-untyped-call]
        if self.collectives is not None:
            self.collectives.begin_call(call, len(self.visits))
        return {}

    def end(self, call: Call, leaving: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Ends a call. leaving: what leaves after it, by flow"""
        if self.collectives is not None:
            self.collectives.end_call()
        self.raise_failure()  # before anything is updated, where the loss went on after it

    def new_visit(self, name: str, units: tuple[int, ...]) -> Visit:
        """Begins a visit of this microbatch."""
        self._may_begin(name)
        trained = tuple(filter(self._trained.__contains__, units))
        self.visits.append(Visit(len(self.visits), name, units, trained))
        return self.visits[-1]

    def _may_begin(self, name: str) -> None:
        if self._failure is not None:
            self.raise_failure()
        if self._running is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self.microbatch}, step {self.number})"
            raise errors.nested_visit(here, self.place)

    def without_grad(self, call: BlockCall, visit: Visit | None = None) -> Sequence[Tensor]:
        """Runs a visit on the pure path without grad, and returns its outputs. No program says what ranks communicate:
        they compare it first.

        visit: None where it is no part of a program
        """
        if visit is None:
            self._may_begin(call.name)
        number = "without grad" if visit is None else f"visit {visit.id}"
        self.place = f"forward of {call.name} ({number}, microbatch {self.microbatch}, step {self.number})"
        part = None if visit is None else visit.id
        self._running = call
        try:
            self.memory.comms.must_agree(SAME_VISITS, {"op": self.place}, self.place)
            if self.collectives is not None:
                self.collectives.begin("forward", part)
            with torch.no_grad():
                outs = pure.outputs(call)
            if self.collectives is not None:
                self.collectives.end()
        except BaseException as error:
            self._failure = self.place, error
            raise
        finally:
            self._running = None
        self.place = f"after {self.place}"
        if self.collectives is not None:
            self.collectives.after("forward", part)
        return outs

    @property
    def failed(self) -> bool:
        """True if a visit has raised."""
        return self._failure is not None

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise errors.after_failure(*self._failure) from self._failure[1]

    def sight(self) -> RankPosition:
        """Returns the position in the step, for the watchdog's thread."""
        return RankPosition(self.place)

    def abort(self, error: BaseException) -> None:
        """Lets the streams run dry after an exception. If all ranks failed here, the state stays usable."""
        if self.closed:
            return
        self.closed = True
        # cycles through the autograd graph and through a traceback, which the collector cannot see or sees late
        self.token, self._failure, self._running, self.collectives = self.leaf_token, None, None, None
        try:
            self.memory.comms.abort(self.place, error)
        finally:
            self.memory.board.clear()


class Step(NamedTuple):
    """The settings of one step.

    number: of the step; grads: gradient shards, None if no unit is trained
    differentiates: there is a backward; microbatches: calls of the loss
    watch: look for tensors that reach blocks from outside (the first step of a loss)
    step_hooks: the hooks of the step
    """

    number: int
    grads: Shards | None = None
    differentiates: bool = False
    microbatches: int = 1
    watch: bool = False
    step_hooks: StepHooks = NOTHING


SAME_VISITS = "what to communicate (every rank must visit the same units in the same order)"

NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


class Session(Visits):
    """The visits of a step, chained by a token, and the ops of its program around them; leaves; failures.

    verified: the program, of one stage if there are several
    segment: what a pipeline's call under way does at visits (pipeline.py); None without stages
    """

    def __init__(self, memory: Memory, step: Step, verified: Verified) -> None:
        memory.ready()
        super().__init__(memory, step.number, differentiates=step.differentiates, trains=step.grads is not None)
        self.verified, self.grads, self.microbatches = verified, step.grads, step.microbatches
        self.watch, self.step_hooks = step.watch, step.step_hooks
        self.segment: Any = None
        self.differentiating = False  # the step's own backward is running
        self._seen_at = "", ""  # the place, and with its stage
        cuda = memory.comms.device.type == "cuda"
        self._compute_stream = torch.cuda.current_stream(memory.comms.device) if cuda else None
        self._cursor = 0
        self._ops: Sequence[Op] = verified.ops
        self._last: ComputeOp | None = None
        self._later: dict[tuple[int, int], Later] = {}  # (visit, microbatch) between the halves of its backward
        self.slots = acquire(memory)
        self.slots.reserve_for(verified.program)
        if verified.has_carry_slots and self.slots.carries is None and self.step_hooks.carries is not None:
            self.slots.carries = self.step_hooks.carries(memory, self.slots.number)
        if verified.crossing is not None and self.slots.carries is not None:
            self.slots.carries.reserve(verified.crossing, verified.program)
        # blocks are watched in Python, which a replay does not run
        self.replays = None if step.watch else self.step_hooks.replays
        self.interpreter = Interpreter(memory, self.slots, self.grads, self.step_hooks, step=self.number)

    # ---- the program, beside the visits

    def start(self) -> None:
        """Gathers units that slots should hold from the step before and do not; then issues the ops before the first
        visit."""
        missing = self.slots.missing()
        for index, (unit, slot) in enumerate(missing):
            self.interpreter.issue(Gather((unit,), (slot,)), NOT_THERE, number=index - len(missing))
        self.follow()

    def plan(self, kind: Kind, visit: Visit, microbatch: int) -> ComputeOp:
        """Returns the op of this compute, which must be the next one of the program."""
        trace = self.verified.program.trace
        op = self._ops[self._cursor] if self._cursor < len(self._ops) else None
        if isinstance(op, Forward if kind == "forward" else Backward):
            planned = trace.visits[op.visit]
            same = planned.units == visit.units and planned.trained == visit.trained
            if same and (op.visit, op.microbatch) == (visit.id, microbatch):
                return op
        raise errors.visit_differs_from_program(self.place, op, trace)

    def follow(self, op: ComputeOp | None = None, visit: Visit | None = None, *, ending: bool = False) -> None:
        """Executes the program up to its next compute: after `op`, of `visit`, or where a call begins or ends. The norm
        and updates come only when `ending`."""
        ops = self._ops
        if op is not None:
            self._cursor, self._last = self._cursor + 1, op
            if op.gives:  # what is to be sent is at hand when the call ends
                return
        while True:
            if self._cursor == len(ops):
                return
            following = ops[self._cursor]
            if isinstance(following, Forward | Backward):
                return
            if not isinstance(following, Norm | Update):
                self.interpreter.issue(following)
            elif not ending:
                return  # gradients of leaves read outside visits are known only after the whole backward
            else:
                self.optimize(following)
            self._cursor += 1

    def to_sum(self) -> set[int]:
        """Returns the units whose gradient an op will still sum over replicas."""
        left = self._ops[self._cursor :]
        return {unit for op in left if isinstance(op, AllReduce) for unit in op.units}

    def finish(self) -> None:
        """Runs what is left: the optimizer's step, if there is one."""
        self.follow(ending=True)
        if self._cursor < len(self._ops):
            raise errors.step_ended_early(self._ops[self._cursor], self.verified.program.trace)
        if self.step_hooks.updates is not None:
            self.optimize_all(self.verified.tail)

    def sight(self) -> RankPosition:
        """Returns the position in the step, for the watchdog's thread."""
        stage = self.memory.comms.stage
        if self._seen_at[0] is not self.place:  # as long as it is the same, it must be the same object
            self._seen_at = self.place, f"{self.place}, stage {stage}" if self.memory.comms.stages > 1 else self.place
        return RankPosition(self._seen_at[1], self._cursor, self.verified.whole, stage)

    # ---- the calls of a step: the forward of a segment, its backward, or the later half of that

    def calls(self) -> Iterator[Call]:
        """Yields the calls of the step, in the order of its program."""
        split = self.verified.program.trace.split
        if split is None:
            for microbatch in range(self.microbatches):
                yield Call("forward", 0, microbatch)
                if self.differentiates:
                    yield Call("backward", 0, microbatch)
            return
        ends = {"forward": 0, "backward": -1, "inputs": -1, "weights": -1}
        for kind, number, microbatch, _ in self.verified.program.trace.order:
            segment = split.segment(number)
            if split.visits(segment)[ends[kind]] == number:
                yield Call(kind, segment, microbatch)

    def begin(self, call: Call) -> dict[int, list[Tensor]]:
        """Begins a call. Returns what arrives for it, by flow, from its carry slots: nothing without stages."""
        super().begin(call)
        if self.verified.crossing is None:
            return {}
        op = self._ops[self._cursor]
        assert isinstance(op, Forward | Backward), "issued ahead up to a compute"
        parcels = self.verified.crossing.split.takes(kind_of(op), op.visit, op.microbatch)
        self.place = f"what arrives for {self.named(call)}"
        with self.memory.using([("carry slot", self.slots.number, slot) for slot in op.takes]):
            pairs = list(zip(parcels, op.takes, strict=True))
            values = self.slots.carries.get(pairs) if pairs else []
        return {parcel.flow: tensors for parcel, tensors in zip(parcels, values, strict=True)}

    def end(self, call: Call, leaving: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Ends a call. What leaves after it, by flow, goes into its carry slots, and the program goes on."""
        # what left it hangs on a graph whose visits hold this session: a cycle that no collector sees
        self.segment = None
        super().end(call, leaving)
        if self.verified.crossing is None:
            return
        op = self._last
        assert op is not None, "a segment has visits"
        parcels = self.verified.crossing.split.gives(kind_of(op), op.visit, op.microbatch)
        self.place = f"what leaves after {self.named(call)}"
        with self.memory.using([], [("carry slot", self.slots.number, slot) for slot in op.gives]):
            if parcels:
                pairs = zip(parcels, op.gives, strict=True)
                self.slots.carries.put(pairs, [leaving[parcel.flow] for parcel in parcels])
        self.follow()

    def named(self, call: Call) -> str:
        return f"{call.kind} of segment {call.segment} (microbatch {call.microbatch}, step {self.number})"

    def weights(self, call: Call) -> None:
        """Runs the later halves of the backwards of a segment."""
        assert self.verified.crossing is not None
        self.microbatch = call.microbatch
        for number in reversed(self.verified.crossing.split.visits(call.segment)):
            visit = self.verified.program.trace.visits[number]
            with self.compute("weights", visit, call.microbatch) as op:
                assert isinstance(op, Backward)
                later = self._later.pop((number, call.microbatch))
                with torch.no_grad():
                    later.write(self.interpreter.places(op, visit.trained))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Marks the step's own backward; any other backward through a visit is refused."""
        self.differentiating = True
        try:
            yield
        finally:
            self.differentiating = False

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """Ends all computes. Untouched gradients are zeroed; `leaf_grads`, per group, are added."""
        self.raise_failure()
        self.place = f"the end of step {self.number}"
        uses_leaves = any(grad is not None for grad in leaf_grads)
        if uses_leaves and self.memory.comms.deterministic:
            raise RuntimeError(errors.ORDERED)
        if self.grads is None:
            return
        to_sum = self.to_sum()
        with torch.no_grad(), self.memory.using([], [("grad shard", unit) for unit in self.grads.rows]):
            self.interpreter.zero_untouched(self.grads.rows)
            if uses_leaves:
                self._add(leaf_grads, to_sum)

    def _add(self, leaf_grads: Sequence[Tensor | None], to_sum: set[int]) -> None:
        """Adds gradients of leaves that the loss reads outside visits, per group, to those of its visits.

        to_sum: units that an op still sums over replicas; they get this rank's part, others the whole
        """
        assert self.grads is not None
        for group, extra in zip(self.memory.groups, leaf_grads, strict=True):
            if extra is not None:
                whole = Shards([group], [self.memory.comms.sum_over_replicas(extra.contiguous())])
                for unit, row in Shards([group], [extra]).rows.items():
                    self.grads.rows[unit].add_(row if unit in to_sum else whole.rows[unit])

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
        self.closed = True
        self.token, self.collectives = self.leaf_token, None  # which holds this session, and so its slots
        self.slots.release()

    def abort(self, error: BaseException) -> None:
        """Its slots are dropped, not given back: what they hold is of no use."""
        self.segment = None
        super().abort(error)

    # ---- visits, as `visit` drives them

    def later_half(self, visit: Visit, microbatch: int) -> Later:
        """Returns where the first half of a visit's backward leaves what the second is to do."""
        later = self._later[visit.id, microbatch] = Later(self.slots.storages)
        return later

    @contextmanager
    def compute(self, kind: Kind, visit: Visit, microbatch: int) -> Iterator[ComputeOp]:
        """Issues a compute's op and waits until it may run; after the block, issues what may follow."""
        op = self.begin_compute(kind, visit, microbatch)
        try:
            yield op
        except BaseException as error:
            self.end_compute(error)
            raise
        self.end_compute()

    def begin_compute(self, kind: Kind, visit: Visit, microbatch: int) -> ComputeOp:
        """Issues a compute's op, and waits until it may run. `end_compute` ends it: the backward of a visit that keeps
        its graph begins and ends in two nodes of autograd. Where an error comes between them, the step is aborted."""
        if self._failure is not None:
            self.raise_failure()
        self.place = f"{kind} of {visit.name} (visit {visit.id}, microbatch {microbatch}, step {self.number})"
        op = self.plan(kind, visit, microbatch)
        observer = self.step_hooks.observer
        try:
            if self._compute_stream is not None and self._compute_stream != torch.cuda.current_stream():
                # the scoreboard takes the last compute on a buffer for all earlier ones
                raise RuntimeError(
                    f"{self.place}: runs on another CUDA stream than the step began on; visit on one stream"
                )
            bound = self.slots.bound.get((type(op), op)) or self.interpreter.bind(op, visit)
            run = None if observer is None else observer.issue(op)
            if self.collectives is not None:
                self.collectives.begin(kind_of(op), visit.id, run)
            use = self.memory.using(bound.reads, bound.writes, run)
            use.__enter__()
        except BaseException as error:
            self._failure = self.place, error
            raise
        self._running = op, visit, use
        return op

    def end_compute(self, error: BaseException | None = None) -> None:
        """Ends the compute under way. error: that it has raised; else what may follow is issued"""
        assert self._running is not None
        (op, visit, use), self._running = self._running, None
        if self.collectives is not None and error is None:
            try:
                self.collectives.end()
            except BaseException as left:
                use.__exit__(type(left))
                self._failure = (self.place, left)
                raise
        use.__exit__(None if error is None else type(error))
        if error is not None:
            self._failure = (self.place, error)
            return
        self.follow(op, visit)
        self.place = f"after {self.place}"
        if self.collectives is not None:
            self.collectives.after(kind_of(op), visit.id)
