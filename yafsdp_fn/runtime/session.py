"""A session: one execution of a step, beside the user's Python.

    with compute(visit):      # wait for what it needs; check it against the program
        run the block
                              # complete it; issue the communication up to the next compute

Without a program (the first step) ops are issued on demand, every visit recomputes, and the visits are recorded.
With one, the session walks it: what the user's loss visits must be what the program expects, in its order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.runtime.engine import SAME_VISITS, Engine
from yafsdp_fn.runtime.graphs import Graphs
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.runtime.updates import LEAVES_COME_LATE, Updates
from yafsdp_fn.schedules.ops import AllReduce, Backward, Forward, Gather, Norm, Reduce, Update, describe
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.trace import Kind, Trace, Visit, chained_order
from yafsdp_fn.sharded import Context, Sharded
from yafsdp_fn.timeline.record import Recorder

SAME_ORDER = (
    "A loss must visit the same units in the same order at every step and in every microbatch; make another step "
    "function for another order"
)


NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


KEEPS_ALL = (
    "graphs=True, but this schedule keeps the autograd graph of every visit, and such visits are not captured; "
    "recompute layers (remat=ya.remat.all), or leave graphs out"
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


class Session:
    """Runs one step on `store`.

    grads: where reductions add up, None for a forward without gradients
    program: None to run on demand and record
    updates: does the norms and updates of a program that has them
    recorder: of what runs; not of visits without grad inside a training step
    watch: look for tensors that reach blocks from outside (the first step of a loss)
    graphs: of visits that keep nothing; used if there is a program
    checked: ranks compare every collective before they issue it; by default, when there is no program
    """

    def __init__(
        self,
        store: Store,
        *,
        program: Program | None,
        grads: Shards | None,
        step: int,
        microbatches: int = 1,
        watch: bool = False,
        checked: bool | None = None,
        updates: Updates | None = None,
        recorder: Recorder | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        store.comms.check()
        store.ready()
        self.store, self.program, self.grads = store, program, grads
        self.step, self.microbatches, self.watch = step, microbatches, watch
        self.updates = updates
        self.graphs: Graphs | None = None
        if program is not None and graphs is not None:  # before there is a program, slots are no static memory
            if not any(isinstance(op, Forward) and not op.keep for op in program.ops):
                raise ValueError(KEEPS_ALL)
            self.graphs = graphs
        self.checked = program is None if checked is None else checked
        slots = store.acquire(planned=program is not None)
        if program is not None:
            slots.reserve_for(program)
        self.slots = slots
        self.engine = Engine(store, slots, grads, checked=self.checked, step=step, recorder=recorder)
        self.closed = False
        self.differentiating = False  # whether the step's own backward runs
        self.uses_leaves = False  # whether the loss reads sharded leaves beside visits
        self._ending = False
        self.visits: list[Visit] = []  # of the current microbatch
        self._recorded: list[Visit] = []
        self._beside: Session | None = None
        self._cursor = 0
        ops = () if program is None else program.ops
        self._last_compute = next((i for i in reversed(range(len(ops))) if isinstance(ops[i], Forward | Backward)), -1)
        self._failure: tuple[str, BaseException] | None = None
        self._held: dict[int, int] = {}  # weight slot -> unit, on demand
        self._microbatch = 0
        self.place = f"before the first visit of step {step}"
        self.leaf_token = torch.zeros((), device=store.comms.device, requires_grad=grads is not None)
        self.token = self.leaf_token
        self.leaves = [
            master.detach().requires_grad_(grads is not None and group.trainable)
            for group, master in zip(store.groups, store.masters(), strict=True)
        ]

    def start(self) -> None:
        """Issues what comes before the first visit, and what the slots should hold from the step before."""
        if self.program is not None:
            missing = self.slots.missing()
            if self.engine.recorder is not None:
                self.engine.recorder.number = -len(missing)  # they are no ops of the program
            for unit, slot in missing:
                self.engine.issue(Gather((unit,), (slot,)), NOT_THERE)
            self._issue_ahead()

    # ---- the step, as `transform` drives it

    def begin_microbatch(self, microbatch: int) -> None:
        self._microbatch = microbatch
        self.visits = []
        if self._beside is not None:
            self._beside.visits = []
        self.token = _Root.apply(self.leaf_token, *self.leaves)  # type: ignore[no-untyped-call]

    def handle(self, node: Sharded) -> Sharded:
        """The session's own handle in place of the state's: visits to it run in this session."""
        old = node.context
        leaves = tuple(self.leaves[k] for k, _, _ in node.group_leaves())
        return Sharded(
            leaves,
            Context(
                old.entry,
                self.store,
                old.first_group,
                seed=old.seed,
                step=old.step,
                session=self,
                microbatch=self._microbatch,
            ),
        )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """While the step's own backward runs; any other backward through a visit is refused."""
        self.differentiating = True
        try:
            yield
        finally:
            self.differentiating = False

    def for_no_grad(self) -> Session:
        """The session that visits without grad run in: of a training step, one beside it, with slots of its own."""
        if self.grads is None:
            return self
        if self._beside is None:
            self._beside = Session(self.store, program=None, grads=None, step=self.step, checked=self.checked)
        return self._beside

    def end_forward(self) -> None:
        """Every microbatch must visit the same units."""
        if self._microbatch == 0:
            self._recorded = self.visits
        elif self.visits != self._recorded:
            pairs = itertools.zip_longest(self._recorded, self.visits)
            names = next([v.name if v else "nothing" for v in pair] for pair in pairs if pair[0] != pair[1])
            raise OrderChanged(
                f"microbatch {self._microbatch} visits {names[1]} where microbatch 0 visits {names[0]}. {SAME_ORDER}"
            )

    def trace(self) -> Trace:
        """What was visited."""
        visits = tuple(self._recorded)
        order = chained_order(visits, self.microbatches, backward=self.grads is not None)
        return Trace(self.store.units, visits, order, self.store.mesh_axes, self.microbatches)

    def finish(self, leaf_grads: Sequence[Tensor | None] = ()) -> None:
        """Ends the step: all of the program runs; untouched gradients are zero; `leaf_grads` are added."""
        self._must_be_sound()
        self.place = f"the end of step {self.step}"
        self.uses_leaves = any(grad is not None for grad in leaf_grads)
        if self.checked:
            self.store.comms.must_agree(SAME_VISITS, {"op": self.place}, self.place)
        if self.program is None and self.grads is not None and self.store.comms.replicas > 1:
            self.engine.issue(AllReduce(tuple(sorted(self.engine.touched))))
        if self.uses_leaves and self.program is not None and self.program.updates_early:
            raise RuntimeError(f"{LEAVES_COME_LATE}. Units were updated already: load a checkpoint into a new state")
        self.engine.finish_grads(list(leaf_grads) or [None] * len(self.leaves))
        self._ending = True
        self._issue_ahead()
        if self.program is not None and self._cursor < len(self.program.ops):
            missing = describe(self.program.ops[self._cursor], self.program.trace)
            raise OrderChanged(f"the step ended, but its program goes on with {missing}. {SAME_ORDER}")
        if self._beside is not None:
            self._beside.finish()
        self.closed = True
        self.token = self.leaf_token
        if self.program is not None or self.grads is None:
            self.store.release(self.slots, planned=self.program is not None)
        else:  # slots on demand of a training step are not kept: from the second step on a program has its own
            self.store.board.forget_set(self.slots.number)

    def abort(self, error: BaseException) -> None:
        """After an exception: lets the streams run dry. Where all ranks failed here, the state stays usable."""
        if self.closed:
            return
        self.closed = True  # its slots are dropped, not given back: what they hold is of no use
        # cycles through the autograd graph and through a traceback, which the collector cannot see or sees late
        self.token, self._failure = self.leaf_token, None
        if self._beside is not None:
            self._beside.closed = True
            self._beside.engine.end()
        self.engine.end()
        self.store.comms.abort(self.place, error)
        self.store.board.clear()

    # ---- visits, as `visit` drives them

    def refuse_nesting(self, name: str) -> None:
        """A block that visits would visit again in every recomputation."""
        self._must_be_sound()
        if self.engine.inside is not None:
            here = f"{name} (visit {len(self.visits)}, microbatch {self._microbatch}, step {self.step})"
            raise RuntimeError(
                f"forward of {here} begins inside {self.engine.inside}: a block cannot visit sharded parameters; "
                "visit them beside it, or give them to the block (a pytree of units to ya.apply, two stacks to ya.scan)"
            )

    def record(self, name: str, units: tuple[int, ...], trained: tuple[int, ...]) -> Visit:
        """A new visit of this microbatch."""
        self.visits.append(Visit(len(self.visits), name, units, trained))
        return self.visits[-1]

    @contextmanager
    def compute(self, kind: Kind, visit: Visit, microbatch: int) -> Iterator[Forward | Backward]:
        """Issues and waits for what a compute needs; completes it, and issues what may follow, when the block ends."""
        self._must_be_sound()
        self.place = f"{kind} of {visit.name} (visit {visit.id}, microbatch {microbatch}, step {self.step})"
        op = self._planned(kind, visit) if self.program is not None else self._on_demand(kind, visit)
        self.engine.begin(op, visit, self.place, self._then(op))
        try:
            yield op
        except BaseException as error:
            self._failure = (self.place, error)
            raise
        self.engine.end()
        if self.program is not None:
            self._cursor += 1
            self._issue_ahead()
        elif isinstance(op, Backward):
            for unit, slot in zip(visit.trained, op.grad_slots, strict=True):
                self.engine.issue(Reduce((unit,), (slot,)))

    def _must_be_sound(self) -> None:
        if self._failure is not None:
            place, error = self._failure
            raise RuntimeError(
                f"{place} raised {type(error).__name__}, and the loss went on: a step cannot continue after a failed "
                "visit; let the exception out of the loss"
            ) from error

    def _issue_ahead(self) -> None:
        """Executes the program up to its next compute."""
        ops = () if self.program is None else self.program.ops
        while self._cursor < len(ops) and not isinstance(op := ops[self._cursor], Forward | Backward):
            if isinstance(op, Norm | Update) and not self._ending and self._cursor > self._last_compute:
                return  # gradients that reach leaves themselves are known when the whole backward is over
            if isinstance(op, Norm | Update):
                assert self.updates is not None
                work = self.updates.norm if isinstance(op, Norm) else partial(self.updates.update, op.units)
                self.engine.run(op, work)
            else:
                self.engine.issue(op)
            self._cursor += 1

    def _then(self, op: Forward | Backward) -> Backward | None:
        """The next compute, where it is the backward of the visit whose forward `op` is and whose graph it keeps."""
        if self.program is None or not isinstance(op, Forward) or not op.keep:
            return None
        ops, cursor = self.program.ops, self._cursor + 1
        while cursor < len(ops) and not isinstance(ops[cursor], Forward | Backward):
            cursor += 1
        then = ops[cursor] if cursor < len(ops) else None
        return then if isinstance(then, Backward) and then.visit == op.visit else None

    def _planned(self, kind: Kind, visit: Visit) -> Forward | Backward:
        assert self.program is not None
        ops, trace = self.program.ops, self.program.trace
        op = ops[self._cursor] if self._cursor < len(ops) else None
        if isinstance(op, Forward if kind == "forward" else Backward):
            planned = trace.visits[op.visit]
            if op.visit == visit.id and planned.units == visit.units and planned.trained == visit.trained:
                return op
        wanted = "has ended" if op is None else f"expects {describe(op, trace).partition(' in slot')[0]} here"
        raise OrderChanged(f"{self.place}: the program {wanted}. {SAME_ORDER}")

    def _on_demand(self, kind: Kind, visit: Visit) -> Forward | Backward:
        """Gathers what is not there, into slots that depend on the unit and its place in the visit."""
        units = self.store.units
        slots = []
        for position, unit in enumerate(visit.units):
            stacked = units[unit].stack is not None
            slots.append(2 * position + units[unit].layer % 2 if stacked else 2 * len(units) + unit)
        for unit, slot in zip(visit.units, slots, strict=True):
            if self._held.get(slot) != unit:
                self.slots.reserve({slot: units[unit].gather_bytes}, {})
                self.engine.issue(Gather((unit,), (slot,)))
                self._held[slot] = unit
        if kind == "forward":
            return Forward(visit.id, tuple(slots), keep=False)
        grad_slots = tuple(slots[visit.units.index(unit)] for unit in visit.trained)
        for unit, slot in zip(visit.trained, grad_slots, strict=True):
            self.slots.reserve({}, {slot: units[unit].reduce_bytes})
        return Backward(visit.id, tuple(slots), grad_slots)
