"""What the verbs share: the user's loss, its schedule and programs, and what a step is to run with.

results, observer = StepFunction(loss, ...).run(arguments, memory, shards, seed)
"""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from yafsdp_fn import alike, optim
from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.engine import leaf_gradients
from yafsdp_fn.engine.building import Building, Verified, agree
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.engine.protocols import CarrySlots, Plugs, Replays, Updates
from yafsdp_fn.engine.shards import Shards
from yafsdp_fn.engine.steps import Arguments, Results, Seed, run_plain, run_sharded
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.schedules import Lent, Pipeline, Program, Schedule, Trace, UpdateWhen, zero3
from yafsdp_fn.schedules.stages.builders import AnySchedule, one_f_one_b
from yafsdp_fn.timeline.record import RECORDINGS, Recorder

DEFAULT: Schedule = zero3()


class Programs(Building):
    """Those of one function, built and agreed on once for each kind of state. options: of `Building`"""

    def __init__(self, schedule: AnySchedule, **options: Any) -> None:
        super().__init__(schedule, **options)
        self._kept: dict[tuple[str, int], Verified] = {}  # by `Placement.key` and microbatches

    def get(self, memory: Memory, microbatches: int) -> Verified | None:
        """The program for `memory`, None before its first step."""
        found = self.peek(memory, microbatches)
        if found is not None and (memory.key, microbatches) not in self._kept:
            self._keep(found, memory)
        return found

    def peek(self, memory: Memory, microbatches: int) -> Verified | None:
        """The same, without a word between ranks: one rank may ask alone."""
        return self._kept.get((memory.key, microbatches)) or self.given(memory, microbatches)

    def learn(self, memory: Memory, trace: Trace, *, uses_leaves: bool) -> Verified:
        """After the computes of a first step: builds the program."""
        found = self.build(self.complete(trace, memory))
        if uses_leaves and found.updates_early:
            raise ValueError(leaf_gradients.LATE)
        self._keep(found, memory)
        return found

    def _keep(self, found: Verified, memory: Memory) -> None:
        agree(found.program, memory.comms)
        self._kept[memory.key, found.program.trace.microbatches] = found


class StepFunction:
    """A function to differentiate or evaluate, with its schedule and its programs.

    track: whether it is differentiated; graphs: whether visits are to be replayed as CUDA graphs
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
        self._schedule = schedule
        self._pipelines: Any = None  # made on the first mesh with stages
        self._tx, self._skips, self._graphs = tx, skip_nonfinite, graphs
        self._replays: Replays | None = None
        self._agreed: WeakSet[Communicators] = WeakSet()

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...] = (0,)) -> Arguments:
        return Arguments(self.fun, args, kwargs, argnums, self.microbatches)

    def complete(self, trace: Trace, placement: Placement[Any]) -> Trace:
        """`trace` with what only the step knows: when units may be updated, and the memory of its optimizer."""
        from yafsdp_fn.tracing.optimizer import measured_leaves, optimizer_memory

        trace = self.programs.complete(trace, placement)
        if self._tx is None:
            return trace
        layout, precision, device = placement.layout, placement.precision, placement.comms.device
        optimizer = optimizer_memory(self._tx, layout, precision, self._skips, device)
        return trace._replace(optimizer=optimizer, lent=measured_leaves(self._tx, trace.lent, placement))

    def programs_on(self, memory: Memory) -> Any:
        """The programs of this function: `Programs`, or `Pipelines` where the mesh has stages."""
        if memory.comms.stages == 1:
            return self.programs
        from yafsdp_fn.staged.programs import Pipelines

        if self._pipelines is None:
            schedule = one_f_one_b() if self._schedule is DEFAULT else self._schedule
            self._pipelines = Pipelines(schedule, self.programs.complete, self.track)
        return self._pipelines

    def program(self, memory: Memory, parts: int) -> Program | Pipeline | None:
        """The one in use for this memory and so many microbatches, None before the first step."""
        found = self.programs_on(memory).peek(memory, parts)
        return None if found is None else getattr(found, "pipeline", found.program)

    def _lent(self, placement: Placement[Any]) -> tuple[Lent, ...]:
        """The units that the optimizer updates in parts."""
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
        """What the function gave, and who observed it, if anybody did."""
        context = copy_context()  # the counter of visits ends with it, wherever an interrupt comes
        if memory is None:
            if self._graphs:
                raise ValueError("graphs=True captures visits to a ShardedState; this state is plain")
            return context.run(run_plain, arguments, seed, has_aux=self.has_aux, track=self.track), None
        comms = memory.comms
        if comms not in self._agreed:
            alike.compare(comms, self.fun, self._tx)
            self._agreed.add(comms)
        programs = self.programs_on(memory)
        known = programs.peek(memory, arguments.parts)
        if self._graphs and known is not None and not known.recomputes:
            raise ValueError(
                "graphs=True, but this schedule keeps the autograd graph of every visit, and such visits are not "
                "captured; recompute layers (remat=ya.remat.all), or leave graphs out"
            )
        recordings = RECORDINGS.get()
        observer = Recorder(recordings, comms.device.type == "cuda") if recordings else None
        plugs = Plugs(observer, updates, self._replays_on(comms.device), _carry_slots)
        how: Any = {"has_aux": self.has_aux, "track": self.track, "plugs": plugs}
        if comms.stages > 1:
            from yafsdp_fn.staged.run import run_staged

            results = context.run(run_staged, arguments, memory, programs, shards, seed, **how)
        else:
            verified, learn = programs.get(memory, arguments.parts), partial(programs.learn, memory)
            results = context.run(run_sharded, arguments, memory, verified, learn, shards, seed, **how)
        if observer is not None:
            learnt = programs.peek(memory, arguments.parts)
            assert learnt is not None
            title = f"measured, rank {comms.world_rank} of {comms.world}{', on demand' if known is None else ''}"
            observer.finish(learnt.program.trace, title)
        return results, observer

    def _replays_on(self, device: torch.device) -> Replays | None:
        if self._graphs and self._replays is None:
            from yafsdp_fn.levers.cuda_graphs import CudaCapture, Graphs

            self._replays = Graphs(CudaCapture(device))
        return self._replays


def _carry_slots(memory: Memory, number: object) -> CarrySlots:
    from yafsdp_fn.levers.offload import HostCarries

    return HostCarries(memory, number)
