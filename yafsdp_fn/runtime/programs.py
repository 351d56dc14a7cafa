"""The programs of one step function: built from the first step's trace, verified, agreed on by all ranks, kept."""

from __future__ import annotations

import itertools
from typing import Any

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.layout import TreeLayout
from yafsdp_fn.precision import Precision
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules import Program, Schedule, Trace, builders, verify
from yafsdp_fn.schedules.program import describe

Key = tuple[tuple[TreeLayout, int, Precision], int]
"""`Store.key`, microbatches"""


class Programs:
    """schedule: a function from a trace to a program, or a program, which is then used from the first step on."""

    def __init__(self, schedule: Schedule | Program) -> None:
        if not isinstance(schedule, Program) and not callable(schedule):
            raise TypeError(f"schedule: expected a function from a trace to a program, or a Program, got {schedule!r}")
        given: Any = schedule
        if given in (builders.zero2, builders.zero3):
            name = given.__name__
            raise TypeError(f"schedule={name}: that is the factory; call it: schedule=ya.schedules.{name}()")
        self._schedule = schedule
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
            return _fitting(self._schedule, store, microbatches)
        return kept

    def watched(self, store: Store, microbatches: int) -> bool:
        """Whether a step has finished while it looked for tensors that reach blocks from outside."""
        return (store.key, microbatches) in self._watched

    def learn(self, session: Session) -> None:
        """After a step that finished: builds the program, if there is none yet."""
        store = session.store
        key = (store.key, session.microbatches)
        if session.program is None:
            program = self.build(session.trace())
            _agree(program, store.comms)
            self._kept[key] = program
        if session.watch:
            self._watched.add(key)

    def build(self, trace: Trace) -> Program:
        """The verified program for a trace."""
        assert not isinstance(self._schedule, Program)
        program = self._schedule(trace)
        if not isinstance(program, Program):
            raise TypeError(f"the schedule returned {type(program).__name__}, expected a Program")
        return verify(program)


def _fitting(program: Program, store: Store, microbatches: int) -> Program:
    trace = program.trace
    if trace.microbatches != microbatches:
        raise ValueError(f"the program has {trace.microbatches} microbatches, the step {microbatches}")
    for mine, theirs in itertools.zip_longest(store.units, trace.units):
        if mine != theirs:
            raise ValueError(f"the program is of other units: it has {theirs} where this state has {mine}")
    return verify(program)


def _agree(program: Program, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same program."""
    if comms.same_on_all(program.fingerprint(), "comparing programs"):
        return
    trace = program.trace  # in words, only to name the difference; measured costs may differ
    ops = {f"op {index}": describe(op, trace) for index, op in enumerate(program.ops)}
    rest = {part: str(getattr(trace, part)) for part in ("units", "microbatches", "mesh")}
    comms.must_agree("the program", ops | rest | {"visits": str([(v.units, v.trained) for v in trace.visits])})
