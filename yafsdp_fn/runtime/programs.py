"""The programs of one function: those of its schedule, or the one that was given; verified, and checked to fit.

    found = programs.known.get((memory.key, microbatches, shapes))      None before the first step
    found = programs.remember(programs.build(trace), memory)            from what has been recorded or traced

A program is built and agreed on once for each kind of state, and kept. `.lower` builds one without ranks.
"""

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

from yafsdp_fn import optim
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.program.ops import Exchange, Gather
from yafsdp_fn.program.program import Program, after_program
from yafsdp_fn.program.trace import Lent, Trace, UnitSpec, UpdateWhen, arguments
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.schedules.builders import AnySchedule, must_be_made

KEPT_SHAPES = 32
"""Shapes of batches for which a function keeps what it has cut into stages: those that were used last."""


# ---- A program that may run.


class Verified:
    """A program that has passed `verify`, with the facts that a session of one stage needs in every step.

    all_stages: the program of them all; program: of this one; crossing: what it must know of others, if any
    runs: steps that have finished
    tail: the norm and updates to run after a program that has none
    has_carry_slots: it offloads what recomputed visits save
    collectives: what its blocks communicate, as far as it has been seen (block_collectives.py)
    """

    def __init__(self, all_stages: Program, lent: Iterable[Lent], stage: int = 0, crossing: Any = None) -> None:
        self.all_stages = verify(all_stages)
        self.crossing = crossing
        # what a session asks in every step
        self.program = program = all_stages.by_stage[stage]
        self.ops = program.ops
        own = [of for of in lent if of.unit in program.trace.trained]
        self.tail = [] if program.has_updates else after_program(program.trace.trained, own)
        self.has_carry_slots = any(getattr(op, "carry_slot", None) is not None for op in program.ops)
        self.runs = 0
        self.collectives: dict[Any, Any] = {}

    def list(self, collectives: Any) -> None:
        """Lists in the trace what blocks and the loss have called in a step (`BlockCollectives`)."""
        self.all_stages = self.all_stages.with_trace(collectives.listed(self.all_stages.trace))
        (self.program,) = self.all_stages.by_stage


# ---- The programs of a function.


class Programs:
    """The programs of one function, built and agreed on once for each kind of state.

    known: those that have run, by `Placement.key`, microbatches and shapes of the batch, for which alone a step is cut
        into stages (None without stages); the last to run is the last of them
    schedule: a function from a trace to a program, or a program, which is then used from the first step on
    tx: the optimizer of its step; trains: whether the function is differentiated
    """

    def __init__(
        self, schedule: AnySchedule, tx: optim.GradientTransformation | None = None, *, trains: bool = True
    ) -> None:
        must_be_made("schedule", schedule)
        if not isinstance(schedule, Program) and not callable(schedule):
            raise TypeError(
                f"schedule: expected a function from a trace to a program, or a Program, got {schedule!r}; calls make "
                "them: schedule=ya.schedules.zero3()"
            )
        self._schedule, self._tx, self.trains = schedule, tx, trains
        self._update_when: UpdateWhen = "never" if tx is None else "after norm"
        self._not_unitwise = None if tx is None else optim.why_not_unitwise(tx)
        self.known: dict[tuple[Hashable, int, Hashable], Verified] = {}

    # ---- kept

    def peek(self, memory: Placement[Any], microbatches: int, shapes: Hashable) -> Verified | None:
        """Returns the program that ran last, or on a batch of these `shapes`, or the one given in place of a schedule;
        without a word between ranks: one rank may ask alone."""
        if shapes is not None:
            return self.known.get((memory.key, microbatches, shapes))
        for (key, count, _), found in reversed(self.known.items()):
            if (key, count) == (memory.key, microbatches):
                return found
        return self.given(memory, microbatches)

    def remember(self, found: Verified, memory: StateMemory, shapes: Hashable = None) -> Verified:
        """Remembers a program, which all ranks agree on before its first step; across stages for batches of these
        `shapes`. All ranks call it."""
        comms = memory.comms
        ops = [*found.ops, *found.tail]
        agree(found.all_stages, comms)
        # what it communicates is connected before its first step: see `Communicators.connect`
        if any(isinstance(op, Gather) and op.source == "node" for op in ops):
            for ranks in dict.fromkeys(memory.ranks_of.values()):
                ranks.connect("gather_local", "all-gather")
        if any(isinstance(op, Exchange) for op in ops):
            comms.connect("reduce", "exchange")
        self.known[memory.key, found.all_stages.trace.microbatches, shapes] = found
        # all ranks ask and keep alike, and so forget alike
        by_shapes = [each for each in self.known if each[2] is not None]
        for oldest in by_shapes[:-KEPT_SHAPES]:
            del self.known[oldest]
        return found

    # ---- the trace of a step

    def complete(self, trace: Trace, placement: Placement[Any]) -> Trace:
        """Adds to `trace` what only the step knows: when units may be updated, and in how many parts."""
        ordered = placement.comms.deterministic and trace.trains
        return trace._replace(update_when=self._update_when, lent=self._lent(placement), ordered=ordered)

    def _lent(self, placement: Placement[Any]) -> tuple[Lent, ...]:
        """Returns the units that the optimizer updates in parts."""
        if self._tx is None:
            return ()
        parts = optim.parts_of(self._tx, trainable(placement.meta_params()))
        return tuple(Lent(unit, parts[unit]) for unit in sorted(parts))

    # ---- built

    def given(self, memory: Placement[Any], microbatches: int) -> Verified | None:
        """The program that stands in the place of a schedule, if it is of this state and step. Across stages it is
        known only when the step has been traced."""
        if not isinstance(self._schedule, Program) or memory.comms.stages > 1:
            return None
        # its visits are compared when they come
        here = self._schedule.trace._replace(units=memory.units, mesh=memory.mesh_axes, split=None)
        wanted = self.complete(here._replace(microbatches=microbatches), memory)
        return self._sound(self._fitting(self._schedule, wanted), wanted.lent)

    def build(self, trace: Trace, stage: int = 0, crossing: Any = None) -> Verified:
        """The verified program for a trace. stage: that is to run it, of several"""
        if isinstance(self._schedule, Program):
            program = self._fitting(self._schedule, trace)
        else:
            program = self._schedule(trace)
            if not isinstance(program, Program):
                raise TypeError(f"the schedule returned {type(program).__name__}, expected a Program")
            # of this step?
            _check_stages(program, trace)
            if (differs := difference(program.trace, trace)) is not None:
                # it would be judged by another trace than the one that runs
                raise ValueError(
                    f"the schedule returned a program of another trace: {differs}; return Program(trace, ops)"
                )
        return self._sound(program, trace.lent, stage, crossing)

    def _fitting(self, program: Program, wanted: Trace) -> Program:
        """`program`, which was given from outside, if it is of the step that is wanted."""
        theirs = program.trace
        if not program.has_updates:
            wanted = wanted._replace(update_when=theirs.update_when, lent=theirs.lent)
        differs = difference(theirs, wanted)
        if theirs.trains != self.trains:
            differs = f"it is of {'a training step' if theirs.trains else 'an evaluation'}, which this is not"
        if differs is not None:
            shape = "" if wanted.split is None else ", with a batch of this shape"
            raise ValueError(f"the program does not fit: {differs}; lower it from this step{shape}")
        _check_stages(program, wanted)
        return program

    def _sound(self, all_stages: Program, lent: Iterable[Lent], stage: int = 0, crossing: Any = None) -> Verified:
        found = Verified(all_stages, lent, stage, crossing)
        if all_stages.has_updates and self._not_unitwise is not None:
            raise ValueError(
                f"the program updates unit by unit, but {self._not_unitwise}; pass update=False to the schedule"
            )
        return found


# ---- Programs that were given: of this step, and the same on all ranks?


def _check_stages(program: Program, trace: Trace) -> None:
    stages = trace.cut.stages
    if len(program.stages) != stages:
        raise TypeError(
            f"the mesh has {stages} stages, and the schedule returned a Program of {len(program.stages)}; give the "
            "schedule to one of pipelines, ya.schedules.one_f_one_b(ya.schedules.zero2()), say"
        )


def difference(theirs: Trace, ours: Trace) -> str | None:
    """Describes the first difference between a program's trace and the one it would run for; measured costs
    may differ."""
    # where it runs, and on what
    if ours.mesh != theirs.mesh:
        return f"mesh: it has {arguments(dict(theirs.mesh))}, here it is {arguments(dict(ours.mesh))}"
    for mine, other in itertools.zip_longest(ours.units, theirs.units):
        if mine != other:
            return f"it is of other units: it has {_unlike(other, mine)} where there is {_unlike(mine, other)}"
    # what it does
    here = ours.agreed
    there = theirs.agreed
    for name in ("microbatches", "split", "update_when", "lent", "ordered"):
        if here[name] != there[name]:
            return f"{name}: it has {there[name]!r}, here it is {here[name]!r}"
    if ours.order != theirs.order:
        return "order"

    # a trace that was recorded knows what blocks communicate in their forwards alone
    def visits(trace: Trace) -> list[object]:
        return [(v.id, v.name, v.units, v.trained, trace.called_by(v.id)[:2]) for v in trace.visits]

    return "visits" if visits(ours) != visits(theirs) else None


def _unlike(unit: UnitSpec | None, other: UnitSpec | None) -> str:
    """Names a unit, and the fields in which it is not another one of that name."""
    if unit is None:
        return "none"
    parts = [unit.name]
    if other is not None and other.name == unit.name:
        for field, mine, theirs in zip(unit._fields, unit, other, strict=True):
            if mine != theirs:
                parts.append(f"{field}={mine}")
    return ", ".join(parts)


def agree(program: Program, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same program."""
    if comms.same_on_all(program.fingerprint(), "comparing programs"):
        return
    # in words, only to name the difference
    words = {f"op {index}": words for index, words in enumerate(program.words())}
    words |= {name: str(value) for name, value in program.trace.agreed.items()}
    comms.must_agree("the program", words)
