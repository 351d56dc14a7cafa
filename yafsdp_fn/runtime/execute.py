"""Executes a step: the program op by op, beside the user's Python, which makes the visits that it expects.

    start                 gather what is missing                 | ops of the program
    begin_compute         the op at the cursor; wait for slots   | Forward or Backward
    end_compute, follow   issue what comes next, up to the       | Gather, Reduce, ..., Norm, Update
                          next compute: each returns at once

Visits without grad in a training step are in no program: they take the pure path, as all visits do while a first call
is recorded (recording.py). What stages add is in pipelines/session.py.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from yafsdp_fn.communication import flat
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    ComputeOp,
    Forward,
    Gather,
    Norm,
    Op,
    Reduce,
    Update,
    kind_of,
)
from yafsdp_fn.program.split import Call, Kind
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors, pure
from yafsdp_fn.runtime.arguments import INDEPENDENT, Results, StepLoss, add_to
from yafsdp_fn.runtime.block_call import BlockCall, VisitRunner
from yafsdp_fn.runtime.graph_walks import SAMPLES
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.programs import Verified
from yafsdp_fn.runtime.protocols import StepObserver, Works
from yafsdp_fn.runtime.recompute import RecomputedVisit
from yafsdp_fn.runtime.recording import check_origin, foreign_collectives_refused
from yafsdp_fn.runtime.reductions import Mean
from yafsdp_fn.runtime.shards import GradSlot, Shards
from yafsdp_fn.runtime.slots import Slots
from yafsdp_fn.runtime.state import StepUpdates
from yafsdp_fn.runtime.visit import KeptVisit, ToSlots
from yafsdp_fn.runtime.works import WORKS, prepare
from yafsdp_fn.util.randomness import BACKWARD, seeded

# ---- A step: its program, beside the visits.


BackwardRoot = tuple[GradientEdge, Tensor]
"""A root of a backward, and its gradient."""


NOT_THERE = (
    ", since its slot does not hold this step's weights: another program used it, or they were written by hand, which "
    "must happen on all ranks or on none"
)


class Session(VisitRunner):
    """One execution of a step by its program, which is one stage's if there are several (`StageSession`).

    grads: gradient shards, None if no unit is trained; touched: units whose gradient shard has been written
    watch: look for tensors that reach blocks from outside, and for blocks that return other values when they run again:
        in steps 0, 1, 2, 4, 8 and so on, since a loss may change as it goes on; derived: a gradient has come to a
        block that has a graph

    Its hooks (protocols.py): observer: is told of every op, and when it ran; updates: the optimizer; activations: makes
        the content of the carry slots of a slot set, from the memory and the number of the set
    """

    def __init__(
        self,
        memory: StateMemory,
        verified: Verified,
        number: int,
        grads: Shards | None,
        *,
        differentiates: bool,
        observer: StepObserver | None,
        updates: StepUpdates | None,
        activations: Callable[[StateMemory, object], Any],
    ) -> None:
        memory.ready()
        super().__init__(memory, number, differentiates=differentiates, trains=grads is not None)
        self.verified, self.grads, self.observer, self.updates = verified, grads, observer, updates
        runs = verified.runs
        self.watch = differentiates and runs & (runs - 1) == 0
        self.derived = False
        self.compared = SAMPLES if self.watch else 0
        cuda = memory.comms.device.type == "cuda"
        self._compute_stream = torch.cuda.current_stream(memory.comms.device) if cuda else None
        # the program, and how far it is
        self._ops: Sequence[Op] = verified.ops
        self._cursor = 0
        # slots, with what they hold now
        self.slots: Slots = memory.idle.pop() if memory.idle else Slots(memory)
        if self.slots.reserved is not verified.program:
            self.slots.reserve_for(verified.program)
        if verified.has_carry_slots and self.slots.activations is None:
            self.slots.activations = activations(memory, self.slots.number)
        self._works: Works = {} if self.slots.activations is None else self.slots.activations.works()
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self.touched: set[int] = set()

    # ---- the program

    def start(self) -> None:
        """Gathers units that slots should hold from the step before, in their current version, and do not; then issues
        the ops before the first visit."""
        contents, versions = self.slots.contents, self.memory.versions
        carried = self.slots.carried.items()
        # on the first step of a program, or where weights were written by hand
        missing = [(unit, slot) for slot, unit in carried if contents.get(slot) != (unit, versions[unit])]
        for index, (unit, slot) in enumerate(missing):
            self.issue(Gather((unit,), (slot,)), NOT_THERE, number=index - len(missing))
        self.follow()

    def follow(self, op: ComputeOp | None = None, *, ending: bool = False) -> None:
        """Executes the program up to its next compute: after `op`, or where a call begins or ends. The norm
        and updates come only when `ending`."""
        ops = self._ops
        # the compute that has just ended
        if op is not None:
            self._cursor += 1
            if op.gives:  # what is to be sent is at hand when the call ends
                return
        # all that is no compute: issued, or left for the end
        while True:
            if self._cursor == len(ops):
                return
            following = ops[self._cursor]
            if isinstance(following, Forward | Backward):
                return
            if not isinstance(following, Norm | Update):
                self.issue(following)
            elif not ending:
                return  # gradients of leaves read outside visits are known only after the whole backward
            else:
                self.optimize(following)
            self._cursor += 1

    def finish(self) -> None:
        """Runs what is left: the optimizer's step, if there is one."""
        # the rest of the program
        self.follow(ending=True)
        if self._cursor < len(self._ops):
            raise errors.step_ended_early(self._ops[self._cursor], self.verified.program.trace)
        # what follows a program without updates
        for op in self.verified.tail if self.updates is not None else ():
            if isinstance(op, Norm | Update):
                self.optimize(op)
            else:
                self.issue(op)

    def rank_position(self) -> str:
        program = self.verified.all_stages.fingerprint()[:8]
        return f"{self.position}, op {self._cursor} of {len(self._ops)} of program {program}"

    # ---- computes

    def outputs_of(self, call: BlockCall, visit: Visit | None) -> Sequence[Tensor]:
        if visit is None:
            return pure.without_grad(self, call)
        op: Any = self.begin_compute("forward", visit, self.microbatch)
        if self.differentiates:
            kind = KeptVisit if op.keep else RecomputedVisit
            outs = kind(self, call, visit).forward(op)
        else:
            outs = RecomputedVisit(self, call, visit).outputs(op, call.tensors)
        self.end_compute()
        return outs

    def begin_compute(self, kind: Kind, visit: Visit, microbatch: int) -> ComputeOp:
        """Issues a compute's op, which must be the next one of the program, and waits until it may run. `end_compute`
        ends it: the backward of a visit that keeps its graph begins and ends in two nodes of autograd. Where an error
        comes between them, the step is aborted."""
        self.position = f"{kind} of {visit.name} (visit {visit.id}, microbatch {microbatch}, step {self.number})"
        # it must be the program's next op, and the trace's visit
        trace = self.verified.program.trace
        op = self._ops[self._cursor] if self._cursor < len(self._ops) else None
        if not isinstance(op, Forward if kind == "forward" else Backward):
            raise errors.visit_differs_from_program(self.position, op, trace)
        planned = trace.visits[op.visit]
        expected = op.visit, op.microbatch, planned.units, planned.trained
        if (visit.id, microbatch, visit.units, visit.trained) != expected:
            raise errors.visit_differs_from_program(self.position, op, trace)
        if self._compute_stream is not None and self._compute_stream != torch.cuda.current_stream():
            # the scoreboard takes the last compute on a buffer for all earlier ones
            raise RuntimeError(
                f"{self.position}: runs on another CUDA stream than the step began on; visit on one stream"
            )
        # in its place among the uses of buffers
        prepared = self.slots.prepared.get((type(op), op)) or prepare(self, op, visit)
        run = None if self.observer is None else self.observer.issue(op)
        if self.collectives is not None:
            self.collectives.begin(kind_of(op), visit.id, run)
        comms = self.memory.comms
        event = comms.event() if comms.streams else None
        self.memory.board.begin(event, prepared.reads, prepared.writes, run)
        self.running = op, visit, event, run
        return op

    def end_compute(self) -> None:
        """Ends the compute under way, and issues what may follow."""
        (op, visit, event, run), self.running = self.running, None
        if self.collectives is not None:
            self.collectives.end()
        self.memory.board.end(event, run)
        self.follow(op)
        self.position = f"after {self.position}"
        if self.collectives is not None:
            self.collectives.after(kind_of(op), visit.id)

    def target(self, op: Backward, visit: Visit) -> Any:
        """Returns what takes the gradients of a visit's weights to its slots, and records that these will hold some."""
        # a gradient is added to what a slot holds of the same unit, and overwrites all else
        slots = self.slots
        out: list[GradSlot] = []
        for unit, slot in zip(visit.trained, op.grad_slots, strict=True):
            if unit in self.memory.grads_alias:  # the slot is the shard: it stays written after its reduction
                add = unit in self.touched
                self.touched.add(unit)
            else:
                add = self._unreduced.get(slot) == unit
                self._unreduced[slot] = unit
            views = slots.grad_views.get((slot, unit)) or slots.grad(slot, unit, self.grads)
            out.append(GradSlot(views, add))
        return ToSlots(out)

    def early_grad_slots(self, op: Forward, trained: Sequence[int]) -> list[GradSlot]:
        """Returns the slots of the backward of `op`, `target`'s, if `op` may write there already; else none."""
        if self.grads is None or self.memory.grads_alias & self.touched.intersection(trained):
            return []  # a shard that stands for its slot already has an earlier microbatch's gradient
        slots = self.slots
        out: list[GradSlot] = []
        for unit, slot in zip(trained, op.early, strict=True):
            views = slots.grad_views.get((slot, unit)) or slots.grad(slot, unit, self.grads)
            out.append(GradSlot(views, False))
        return out

    # ---- issued ops

    def issue(self, op: Op, why: str = "", number: int | None = None) -> None:
        """Puts an op on its stream. why: reason, for errors; number: position of an op before the program"""
        run = None if self.observer is None else self.observer.issue(op, number)
        prepared = self.slots.prepared.get((type(op), op)) or prepare(self, op)
        if isinstance(op, Reduce):
            work = self._reduce(op)
        else:
            work = prepared.work if prepared.stream == "gather" else self.work(op)
        # what slots hold from here on
        for unit, slot in prepared.fills:
            self.slots.contents[slot] = unit, self.memory.versions[unit]
        if work is None:  # slots are the shards
            return
        comms = self.memory.comms
        stream = comms.streams.get(prepared.stream)
        if stream is None:  # one rank: what is left is a copy, on the compute stream
            if run is not None:
                run.on("compute", None)
                work = run.timed(work)
            with torch.no_grad():
                work()
            return
        # issued: it runs when the uses that it waits for have ended
        if comms.steps.lost is not None:
            comms.check()
        label = f"{prepared.name} (step {self.number}){why}"
        event = comms.event()
        waits = self.memory.board.use(event, prepared.stream, prepared.reads, prepared.writes)
        if run is not None:
            run.on(prepared.stream, event, waits)
            work = run.timed(work)
        stream.submit(work, waits, event, label)

    def work(self, op: Op) -> Work | None:
        """Returns the work of an op that is no reduction; None where there is none, since slots are the shards, say."""
        kind: type[Any] = type(op)
        return self._works[kind](op) if kind in self._works else WORKS[kind](self, op)

    def _reduce(self, op: Reduce) -> Work | None:
        memory, slots, grads = self.memory, self.slots, self.grads
        assert grads is not None
        units: list[int] = []
        wholes: list[Tensor] = []
        shards: list[Tensor] = []
        converted = False
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            if unit in memory.grads_alias:
                continue
            self._unreduced.pop(slot, None)
            views = slots.grad_views.get((slot, unit)) or slots.grad(slot, unit, grads)
            shard = grads.rows[unit]
            units.append(unit)
            wholes.append(views.flat)
            shards.append(shard)
            converted |= views.flat.dtype != shard.dtype
        # what an earlier reduction of the step has written is added to
        adds = list(map(self.touched.__contains__, units))
        self.touched.update(op.units)
        own = list(map(memory.reduced_in.get, units))
        # a sum lands in its shard where it need not be converted or added
        sums = list(map(memory.sums.get, units))
        straight = not any(adds) and not any(sums) and not converted
        receive = memory.nothing if straight else memory.buffer("receive")

        reduce = partial(flat.reduce_into, receive=receive)
        return self.by_ranks(units, reduce, shards, wholes, adds, sums, own)

    def by_ranks(self, units: Sequence[int], work: Callable[..., None], *columns: Sequence[Any]) -> Work | None:
        """Returns `work(comms, *columns)`, once for all units that are cut over the same ranks; None without units."""
        ranks_of = self.memory.ranks_of
        together: dict[Communicators, list[int]] = {}
        for at, unit in enumerate(units):
            together.setdefault(ranks_of[unit], []).append(at)
        jobs: list[Work] = []
        for comms, some in together.items():
            own: list[list[Any]] = []
            for column in columns:  # on the way of every visit: no call
                own.append(list(map(column.__getitem__, some)))
            jobs.append(partial(work, comms, *own))
        if len(jobs) < 2:
            return jobs[0] if jobs else None

        def in_turn() -> None:
            for job in jobs:
                job()

        return in_turn

    # ---- the calls of the loss, and the end of the step

    def run_calls(self, loss: StepLoss) -> Results:
        """Runs the loss: forward and backward of each microbatch in turn."""
        arguments = loss.arguments
        results = Results([], [], [None] * len(arguments.plain))
        # of leaves that the loss reads beside its visits, over all microbatches
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        leaf_grads: list[Tensor | None] = [None] * len(leaves)

        for microbatch in range(arguments.microbatches):
            # forward
            self.begin(Call("forward", 0, microbatch))
            mean, aux = self.call_loss(loss, microbatch)
            results.append(mean, aux)
            self.end()
            roots = [self.loss_root(mean), self.token_root()] if self.differentiates else []
            del mean, aux  # the backward frees memory as it goes, but for what something holds
            if not roots:
                continue
            # backward
            self.begin(Call("backward", 0, microbatch))
            grads = self.gradients(loss, microbatch, roots, [*leaves, *arguments.plain])
            if self.watch and not self.derived and all(grad is None for grad in grads):
                raise ValueError(INDEPENDENT)  # blocks without grad, where visits that recompute hid it
            found = iter(grads)
            add_to(leaf_grads, found)
            add_to(results.grads, found)
            self.end()
            del roots, grads, found  # a graph that is done needs no memory in the next forward
        found = iter(leaf_grads)
        self.end_backward([next(found) if leaf.requires_grad else None for leaf in self.leaves])
        return results

    def loss_root(self, mean: Mean) -> BackwardRoot:
        """Returns the root of a backward that the loss is: an edge, which holds no memory of the loss."""
        if not mean.total.requires_grad:
            raise ValueError(INDEPENDENT)
        if self.watch:
            check_origin([mean.total], self)
        return get_gradient_edge(mean.total), torch.ones_like(mean.total)

    def token_root(self) -> BackwardRoot:
        """Returns the root that the last token is: visits that the loss does not use get their backward in its
        place."""
        return get_gradient_edge(self.token), torch.zeros_like(self.token)

    def gradients(
        self, loss: StepLoss, microbatch: int, roots: Sequence[BackwardRoot], ends: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Runs the backward of a call, under its random numbers. Returns the gradients of `ends`."""
        comms = self.memory.comms
        drawn = loss.seed.counter(comms, microbatch).seed_beside(BACKWARD)
        collectives = foreign_collectives_refused() if self.watch else nullcontext()
        edges = [edge for edge, _ in roots]
        seeds = [grad for _, grad in roots]
        with seeded(drawn, comms.device), collectives:
            return torch.autograd.grad(edges, [self.leaf_token, *ends], seeds, allow_unused=True)[1:]

    def end_backward(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """Ends all computes. Untouched gradients are zeroed; `leaf_grads`, per group, are added."""
        self.raise_failure()
        self.position = f"the end of step {self.number}"
        uses_leaves = any(grad is not None for grad in leaf_grads)
        if uses_leaves and self.memory.comms.deterministic:
            raise RuntimeError(errors.ORDERED)
        if self.grads is None:
            return
        with torch.no_grad(), self.memory.using([], [("grad shard", unit) for unit in self.grads.rows]):
            self.zero_untouched(self.grads.rows)
            if uses_leaves:
                self._add(leaf_grads)

    def _add(self, leaf_grads: Sequence[Tensor | None]) -> None:
        """Adds gradients of leaves that the loss reads outside visits, per group, to those of its visits. Units that an
        op still sums over replicas get this rank's part, others the whole."""
        assert self.grads is not None
        # what the program still sums over replicas
        left = self._ops[self._cursor :]
        to_sum = {unit for op in left if isinstance(op, AllReduce) for unit in op.units}
        for group, extra in zip(self.memory.groups, leaf_grads, strict=True):
            if extra is None:
                continue
            own = Shards([group], [extra]).rows
            # in turn on all ranks, whether or not some unit needs it
            whole = Shards([group], [self.memory.comms.sum_over_replicas(extra.contiguous())]).rows
            for unit, row in own.items():
                self.grads.rows[unit].add_(row if unit in to_sum else whole[unit])

    def optimize(self, op: Norm | Update) -> None:
        """Computes the norm of the gradient, or the optimizer's step on some units, on the compute stream when it may;
        an untouched gradient counts as zero."""
        updates = self.updates
        assert updates is not None, "norms and updates are of steps that have an optimizer"
        self.position = f"the {'metrics' if isinstance(op, Norm) else 'update'} of step {self.number}"
        run = None if self.observer is None else self.observer.issue(op)
        prepared = self.slots.prepared.get((type(op), op)) or prepare(self, op)
        with self.memory.using(prepared.reads, prepared.writes, run), torch.no_grad():
            self.zero_untouched(op.units)
            if isinstance(op, Norm):
                updates.norm()
            else:
                updates.update(*op)

    def zero_untouched(self, units: Iterable[int]) -> None:
        """Zeroes the gradient shards of `units` that nothing has written."""
        assert self.grads is not None
        for unit in units:
            if unit not in self.touched:
                self.grads.rows[unit].zero_()
                self.touched.add(unit)

    def close(self) -> None:
        """Ends a successful step. After an error slots are dropped, not given back: what they hold is of no use."""
        super().close()
        self.memory.idle.append(self.slots)
