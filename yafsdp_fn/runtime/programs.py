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
from yafsdp_fn.schedules import Optimizer, Program, Schedule, Trace, builders, verify
from yafsdp_fn.schedules.ops import describe

Key = tuple[tuple[TreeLayout, tuple[tuple[str, int], ...], Precision], int]
"""`Store.key`, microbatches"""


FACTORIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")


class Programs:
    """schedule: a function from a trace to a program, or a program, which is then used from the first step on.

    optimizer: what the step's optimizer needs; whole: why it cannot run unit by unit, if it cannot
    """

    def __init__(self, schedule: Schedule | Program, optimizer: Optimizer = "absent", whole: str | None = None) -> None:
        if not isinstance(schedule, Program) and not callable(schedule):
            raise TypeError(f"schedule: expected a function from a trace to a program, or a Program, got {schedule!r}")
        given: Any = schedule
        if given in (getattr(builders, name) for name in FACTORIES):
            name = given.__name__
            raise TypeError(f"schedule={name}: that is the factory; call it: schedule=ya.schedules.{name}()")
        self._schedule, self._optimizer, self._whole = schedule, optimizer, whole
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
            return self._sound(_fitting(self._schedule, store, microbatches, self._optimizer))
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
        """`trace` with what the step's optimizer needs."""
        return trace._replace(optimizer=self._optimizer)

    def build(self, trace: Trace) -> Program:
        """The verified program for a trace."""
        assert not isinstance(self._schedule, Program)
        program = self._schedule(trace)
        if not isinstance(program, Program):
            raise TypeError(f"the schedule returned {type(program).__name__}, expected a Program")
        return self._sound(program)

    def _sound(self, program: Program) -> Program:
        verify(program)
        if program.updates and self._whole is not None:
            raise ValueError(f"the program updates unit by unit, but {self._whole}; pass update=False to the schedule")
        return program


def _fitting(program: Program, store: Store, microbatches: int, optimizer: Optimizer) -> Program:
    trace = program.trace
    if trace.mesh != store.mesh_axes:
        raise ValueError(f"the program is for a mesh {trace.mesh}, the state is on {store.mesh_axes}")
    same = trace.optimizer == optimizer or (trace.optimizer, optimizer) == ("after norm", "any time")
    if program.updates and not same:
        raise ValueError(
            f"the program is for a step whose optimizer is {trace.optimizer!r}, here it is {optimizer!r} (see "
            "schedules.Optimizer: clipping and skip_nonfinite need the norm); lower it from this step"
        )
    if trace.microbatches != microbatches:
        raise ValueError(f"the program has {trace.microbatches} microbatches, the step {microbatches}")
    for mine, theirs in itertools.zip_longest(store.units, trace.units):
        if mine != theirs:
            raise ValueError(f"the program is of other units: it has {theirs} where this state has {mine}")
    return program


def _agree(program: Program, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same program."""
    if comms.same_on_all(program.fingerprint(), "comparing programs"):
        return
    trace = program.trace  # in words, only to name the difference; measured costs may differ
    ops = {f"op {index}": describe(op, trace) for index, op in enumerate(program.ops)}
    rest = {part: str(getattr(trace, part)) for part in ("units", "microbatches", "mesh", "optimizer")}
    comms.must_agree("the program", ops | rest | {"visits": str([(v.units, v.trained) for v in trace.visits])})
