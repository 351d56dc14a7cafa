"""The programs of one step function: built from the first step's trace, verified, agreed on by all ranks, kept."""

from __future__ import annotations

import itertools
from typing import Any

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.layout import TreeLayout
from yafsdp_fn.precision import Precision
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.runtime.updates import LEAVES_COME_LATE
from yafsdp_fn.schedules import Program, Schedule, Trace, UpdateWhen, builders, verify
from yafsdp_fn.schedules.ops import describe

Key = tuple[tuple[TreeLayout, tuple[tuple[str, int], ...], Precision], int]
"""`Store.key`, microbatches"""


class Programs:
    """schedule: a function from a trace to a program, or a program, which is then used from the first step on.

    updates: when units may be updated; whole: why they cannot be one by one, if they cannot
    trains: whether the function is differentiated
    """

    def __init__(
        self,
        schedule: Schedule | Program,
        *,
        updates: UpdateWhen = "never",
        whole: str | None = None,
        trains: bool = True,
    ) -> None:
        if not isinstance(schedule, Program) and not callable(schedule):
            raise TypeError(f"schedule: expected a function from a trace to a program, or a Program, got {schedule!r}")
        given: Any = schedule
        if given in builders.FACTORIES.values():
            name = given.__name__
            raise TypeError(f"schedule={name}: that is the factory; call it: schedule=ya.schedules.{name}()")
        self._schedule, self._updates, self._whole, self._trains = schedule, updates, whole, trains
        self._kept: dict[Key, Program] = {}
        self._watched: set[Key] = set()

    def get(self, store: Store, microbatches: int) -> Program | None:
        """The program for `store`, None before its first step."""
        program = self.peek(store, microbatches)
        if program is not None and (store.key, microbatches) not in self._kept:
            _agree(program, store.comms)
            self._kept[store.key, microbatches] = program
        return program

    def peek(self, store: Store, microbatches: int) -> Program | None:
        """The same, without a word between ranks: one rank may ask alone."""
        kept = self._kept.get((store.key, microbatches))
        if kept is None and isinstance(self._schedule, Program):
            return self._sound(self._fitting(self._schedule, store, microbatches))
        return kept

    def watched(self, store: Store, microbatches: int) -> bool:
        """Whether a step has finished while it looked for tensors that reach blocks from outside."""
        return (store.key, microbatches) in self._watched

    def learn(self, session: Session) -> None:
        """After a step that finished: builds the program, if there is none yet."""
        store = session.store
        key = (store.key, session.microbatches)
        if session.program is None:
            program = self.build(self.complete(session.trace()))
            if session.uses_leaves and program.updates_early:
                raise ValueError(LEAVES_COME_LATE)
            _agree(program, store.comms)
            self._kept[key] = program
        if session.watch:
            self._watched.add(key)

    def complete(self, trace: Trace) -> Trace:
        """`trace` with what only the step knows: when units may be updated."""
        return trace._replace(updates=self._updates)

    def build(self, trace: Trace) -> Program:
        """The verified program for a trace."""
        assert not isinstance(self._schedule, Program)
        program = self._schedule(trace)
        if not isinstance(program, Program):
            raise TypeError(f"the schedule returned {type(program).__name__}, expected a Program")
        differs = _difference(program.trace, trace)
        if differs is not None:  # it would be judged by another trace than the one that runs
            raise ValueError(f"the schedule returned a program of another trace: {differs}; return Program(trace, ops)")
        return self._sound(program)

    def _fitting(self, program: Program, store: Store, microbatches: int) -> Program:
        """`program`, which was given from outside, if it is of this state and step."""
        trace = program.trace
        wanted = trace._replace(units=store.units, mesh=store.mesh_axes, microbatches=microbatches)
        if program.updates and (trace.updates, self._updates) != ("after norm", "any time"):
            wanted = wanted._replace(updates=self._updates)
        differs = _difference(trace, wanted)
        if trace.trains != self._trains:
            differs = f"it is of {'a training step' if trace.trains else 'an evaluation'}, which this is not"
        if differs is not None:
            raise ValueError(f"the program does not fit: {differs}; lower it from this step")
        return program

    def _sound(self, program: Program) -> Program:
        verify(program)
        if program.updates and self._whole is not None:
            raise ValueError(f"the program updates unit by unit, but {self._whole}; pass update=False to the schedule")
        return program


def _difference(theirs: Trace, ours: Trace) -> str | None:
    """Where a program's trace is not the one it would run for; measured costs may differ."""
    for mine, other in itertools.zip_longest(ours.units, theirs.units):
        if mine != other:
            return f"it is of other units: it has {other} where there is {mine}"
    for field in ("mesh", "microbatches", "updates", "order"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            shown = "" if field == "order" else f": it has {other!r}, here it is {mine!r}"
            return f"{field}{shown}"
    if [visit[:4] for visit in ours.visits] != [visit[:4] for visit in theirs.visits]:
        return "visits"
    return None


def _agree(program: Program, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same program."""
    if comms.same_on_all(program.fingerprint(), "comparing programs"):
        return
    trace = program.trace  # in words, only to name the difference; measured costs may differ
    ops = {f"op {index}": describe(op, trace) for index, op in enumerate(program.ops)}
    rest = {part: str(getattr(trace, part)) for part in ("units", "microbatches", "mesh", "updates")}
    comms.must_agree("the program", ops | rest | {"visits": str([(v.units, v.trained) for v in trace.visits])})
