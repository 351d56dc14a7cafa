"""The common part of the verbs: the user's loss, its schedule and programs, and the hooks of a step.

results, observer = StepFunction(loss, ...).run(arguments, memory, shards, seed)
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from yafsdp_fn import optim
from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.program.trace import OptimizerMemory
from yafsdp_fn.runtime import consistency
from yafsdp_fn.runtime.building import Building, Verified, agree
from yafsdp_fn.runtime.consistency import Blocks
from yafsdp_fn.runtime.memory import LATE, Memory, Shards
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.protocols import ActivationBuffers, Replays, StepHooks, Updates
from yafsdp_fn.runtime.steps import Arguments, Results, Seed, run_plain, run_sharded
from yafsdp_fn.schedules import Lent, Program, Trace, UpdateWhen, one_f_one_b, zero3
from yafsdp_fn.schedules.builders import AnySchedule
from yafsdp_fn.timeline.record import RECORDINGS, Recorder
from yafsdp_fn.timeline.spans import MEASURED


def default_schedule(trace: Trace) -> Program:
    """The default schedule: `zero3`, and `one_f_one_b` across stages."""
    return (zero3() if trace.split is None else one_f_one_b())(trace)


class Programs(Building):
    """The programs of one function, built and agreed on once for each kind of state. options: of `Building`"""

    def __init__(self, schedule: AnySchedule, **options: Any) -> None:
        super().__init__(schedule, **options)
        self._kept: dict[Hashable, Verified] = {}  # by `Placement.key`, microbatches and shapes of the batch
        self._last: dict[Hashable, Verified] = {}  # by the first two

    def get(self, memory: Memory, microbatches: int, shapes: Hashable = None) -> Verified | None:
        """The program for `memory`, None before its first step. All ranks ask alike.

        shapes: of the batch, for which alone a step is cut into stages; None without stages
        """
        key = memory.key, microbatches, shapes
        if key not in self._kept and (found := self.given(memory, microbatches)) is not None:
            self._keep(found, memory, shapes)
        if key in self._kept:
            self._last[key[:2]] = self._kept[key]
        return self._kept.get(key)

    def peek(self, memory: Placement[Any], microbatches: int) -> Verified | None:
        """The one that ran last, without a word between ranks: one rank may ask alone."""
        return self._last.get((memory.key, microbatches)) or self.given(memory, microbatches)

    def learn(self, memory: Memory, trace: Trace, *, uses_leaves: bool) -> Verified:
        """Builds the program after the computes of a first step."""
        found = self.build(self.complete(trace, memory))
        if uses_leaves and found.updates_early:
            raise ValueError(LATE)
        self._keep(found, memory)
        return found

    def learn_cut(self, memory: Memory, shapes: Hashable, crossing: Any) -> Verified:
        """Builds the program for the trace of `crossing`, before the first step across stages on a batch of these
        shapes."""
        found = self.build(crossing.trace, memory.comms.stage, crossing)
        self._keep(found, memory, shapes)
        return found

    def _keep(self, found: Verified, memory: Memory, shapes: Hashable = None) -> None:
        agree(found.whole, memory.comms)
        key = memory.key, found.whole.trace.microbatches
        self._kept[*key, shapes] = self._last[key] = found


class StepFunction:
    """A function to differentiate or evaluate, with its schedule and its programs.

    track: it is differentiated; graphs: visits are replayed as CUDA graphs
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        has_aux: bool,
        schedule: AnySchedule,
        microbatches: int | None,
        track: bool = True,
        tx: optim.GradientTransformation | None = None,
        skip_nonfinite: bool = False,
        graphs: bool = False,
    ) -> None:
        if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
            raise ValueError(f"microbatches={microbatches}: expected an integer >= 1")
        self.fun, self.has_aux, self.microbatches, self.track = fun, has_aux, microbatches, track
        whole = None if tx is None else optim.why_not_unitwise(tx)
        after_norm = skip_nonfinite or (tx is not None and optim.needs_norm(tx))
        when: UpdateWhen = "never" if tx is None else "after norm" if after_norm else "any time"
        self.programs = Programs(schedule, update_when=when, whole=whole, trains=track, lent=self._lent)
        self._tx, self._skips, self._graphs = tx, skip_nonfinite, graphs
        self._replays: Replays | None = None
        self._agreed: WeakSet[Communicators] = WeakSet()
        self._same_blocks: WeakSet[Communicators] = WeakSet()

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...] = (0,)) -> Arguments:
        return Arguments(self.fun, args, kwargs, argnums, self.microbatches)

    def complete(self, trace: Trace, placement: Placement[Any]) -> Trace:
        """Adds to `trace` what only the step knows: when units may be updated, and the memory of its optimizer."""
        from yafsdp_fn.runtime.optimizer_memory import measured_leaves, optimizer_memory

        trace = self.programs.complete(trace, placement)
        if self._tx is None:
            return trace
        layout, precision, device = placement.layout, placement.precision, placement.comms.device
        optimizer = optimizer_memory(self._tx, layout, precision, self._skips, device)
        return trace._replace(optimizer=optimizer, lent=measured_leaves(self._tx, trace.lent, placement))

    def program(self, memory: Memory, parts: int) -> Program | None:
        """Returns the program in use for this memory and number of microbatches, None before the first step."""
        found = self.programs.peek(memory, parts)
        return None if found is None else found.whole

    def measured(self, memory: Memory, parts: int) -> Program | None:
        """Returns the same; across stages, adds the optimizer's costs, since all others are there from the first step
        on. Steps need none of them, and do not run the optimizer on fake tensors."""
        found = self.programs.peek(memory, parts)
        if found is not None and memory.comms.stages > 1 and found.whole.trace.optimizer == OptimizerMemory():
            trace, known = found.whole.trace, self.complete(found.whole.trace, memory.abstract())
            found.whole = found.whole.with_trace(trace._replace(lent=known.lent, optimizer=known.optimizer))
        return None if found is None else found.whole

    def _lent(self, placement: Placement[Any]) -> tuple[Lent, ...]:
        """Returns the units that the optimizer updates in parts."""
        if self._tx is None:
            return ()
        parts = optim.parts_of(self._tx, trainable(placement.handles(placement.shards("meta"))))
        return tuple(Lent(unit, parts[unit]) for unit in sorted(parts))

    def run(
        self,
        arguments: Arguments,
        memory: Memory | None,
        shards: Shards | None,
        seed: Seed,
        updates: Updates | None = None,
    ) -> tuple[Results, Recorder | None]:
        """Returns the function's results, and the observer of the run, if any."""
        context = copy_context()  # ends the counter of visits, wherever an interrupt comes
        if memory is None:
            if self._graphs:
                raise ValueError("graphs=True captures visits to a ShardedState; this state is plain")
            return context.run(run_plain, arguments, seed, has_aux=self.has_aux, track=self.track), None
        comms = memory.comms
        programs = self.programs
        known = programs.peek(memory, arguments.parts)
        if self._graphs and known is not None and not known.recomputes:
            raise ValueError(
                "graphs=True, but this schedule keeps the autograd graph of every visit, and such visits are not "
                "captured; recompute layers (remat=ya.schedules.remat.all), or leave graphs out"
            )
        recordings = RECORDINGS.get()
        observer = Recorder(recordings, comms.device.type == "cuda") if recordings else None
        step_hooks = StepHooks(observer, updates, self._replays_on(comms.device), _activation_buffers)
        how: Any = {"has_aux": self.has_aux, "track": self.track, "step_hooks": step_hooks}
        with self._checking_consistency(comms):
            if comms.stages > 1:
                from yafsdp_fn.runtime.pipeline_steps import run_staged
                from yafsdp_fn.runtime.stage_io import shapes

                batch = shapes(arguments.rest)
                verified = programs.get(memory, arguments.parts, batch)
                learn: Callable[..., Verified] = partial(programs.learn_cut, memory, batch)
                run: Callable[..., Results] = partial(run_staged, programs)
            else:
                verified = programs.get(memory, arguments.parts)
                learn, run = partial(programs.learn, memory), run_sharded
            results = context.run(run, arguments, memory, verified, learn, shards, seed, **how)
        if observer is not None:
            learnt = programs.peek(memory, arguments.parts)
            assert learnt is not None
            title = f"{MEASURED}, rank {comms.world_rank} of {comms.world}{', on demand' if known is None else ''}"
            observer.finish(learnt.program.trace, title)
        return results, observer

    @contextmanager
    def _checking_consistency(self, comms: Communicators) -> Iterator[None]:
        """Compares settings across ranks before the first run, and blocks during it, once per mesh."""
        if comms not in self._agreed:
            consistency.compare(comms, self.fun, self._tx)
            self._agreed.add(comms)
        if comms in self._same_blocks or comms.alone:
            yield
            return
        before, comms.blocks = comms.blocks, Blocks(comms)
        try:
            yield
        finally:
            comms.blocks = before
        self._same_blocks.add(comms)

    def _replays_on(self, device: torch.device) -> Replays | None:
        if self._graphs and self._replays is None:
            from yafsdp_fn.extras.cuda_graphs import CudaCapture, Graphs

            self._replays = Graphs(CudaCapture(device))
        return self._replays


def _activation_buffers(memory: Memory, number: object) -> ActivationBuffers:
    from yafsdp_fn.extras.offload import HostActivationBuffers

    return HostActivationBuffers(memory, number)
