"""How a program is built: a schedule's, for a trace, or the one that was given; verified, and made sure to fit.

After a first step, or from `.lower`; the steps that follow take what was kept (step_function.py).
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.schedules import builders
from yafsdp_fn.schedules.measured import Cost
from yafsdp_fn.schedules.ops import Backward, Forward, Norm
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.stages import builders as staged
from yafsdp_fn.schedules.stages.builders import AnySchedule
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.trace import Lent, Trace, UpdateWhen
from yafsdp_fn.schedules.updating import after_program
from yafsdp_fn.schedules.verify import verify


class Verified:
    """A program that has passed `verify`, with what a session asks of it in every step.

    watched: whether a step has finished that looked for tensors that reach blocks from outside
    last_compute: index of the last forward or backward, -1 without
    unmeasured: no norm comes before the updates
    tail: the norm and updates that follow it in a step that has an optimizer, if it has none; lent: the units that this
        optimizer updates in parts
    """

    def __init__(self, program: Program, lent: Iterable[Lent]) -> None:
        self.program = verify(program)
        self.has_updates, self.updates_early = program.has_updates, program.updates_early
        self.unmeasured = self.has_updates and not any(isinstance(op, Norm) for op in program.ops)
        self.tail = [] if program.has_updates else after_program(program.trace.trained, lent)
        computes = [i for i, op in enumerate(program.ops) if isinstance(op, Forward | Backward)]
        self.last_compute = computes[-1] if computes else -1
        self.has_carry_slots = any(getattr(op, "carry_slot", None) is not None for op in program.ops)
        self.watched = False
        self.recomputes = any(isinstance(op, Forward) and not op.keep for op in program.ops)


class Building:
    """schedule: a function from a trace to a program, or a program, which is then used from the first step on.

    update_when: when units may be updated; whole: why they cannot be one by one, if they cannot
    trains: whether the function is differentiated; lent: the units that a placement's optimizer updates in parts
    """

    def __init__(
        self,
        schedule: AnySchedule,
        *,
        update_when: UpdateWhen = "never",
        whole: str | None = None,
        trains: bool = True,
        lent: Callable[[Placement[Any]], tuple[Lent, ...]] = lambda placement: (),
    ) -> None:
        if not isinstance(schedule, Program | Pipeline) and not callable(schedule):
            raise TypeError(f"schedule: expected a function from a trace to a program, or a Program, got {schedule!r}")
        given: Any = schedule
        if given in (*builders.FACTORIES.values(), *staged.FACTORIES.values()):
            name = given.__name__
            raise TypeError(f"schedule={name}: that is the factory; call it: schedule=ya.schedules.{name}()")
        self._schedule, self._update_when, self._whole, self._trains = schedule, update_when, whole, trains
        self._lent = lent

    def given(self, memory: Placement[Any], microbatches: int) -> Verified | None:
        """The program that stands in the place of a schedule, if it is of this state and step."""
        if not isinstance(self._schedule, Program):
            return None
        return self._sound(self._fitting(self._schedule, memory, microbatches), self._lent(memory))

    def complete(self, trace: Trace, memory: Placement[Any]) -> Trace:
        """`trace` with what only the step knows: when units may be updated, and in how many parts."""
        ordered = memory.comms.deterministic and trace.trains
        return trace._replace(update_when=self._update_when, lent=self._lent(memory), ordered=ordered)

    def build(self, trace: Trace) -> Verified:
        """The verified program for a trace."""
        assert not isinstance(self._schedule, Program)
        program = self._schedule if isinstance(self._schedule, Pipeline) else self._schedule(trace)
        if not isinstance(program, Program):
            raise TypeError(f"the schedule returned {type(program).__name__}, expected a Program")
        differs = difference(program.trace, trace)
        if differs is not None:  # it would be judged by another trace than the one that runs
            raise ValueError(f"the schedule returned a program of another trace: {differs}; return Program(trace, ops)")
        return self._sound(program, trace.lent)

    def _fitting(self, program: Program, memory: Placement[Any], microbatches: int) -> Program:
        """`program`, which was given from outside, if it is of this state and step."""
        trace = program.trace
        wanted = trace._replace(units=memory.units, mesh=memory.mesh_axes, microbatches=microbatches)
        wanted = wanted._replace(ordered=memory.comms.deterministic and self._trains)
        if program.has_updates and (trace.update_when, self._update_when) != ("after norm", "any time"):
            wanted = wanted._replace(update_when=self._update_when)
        if program.has_updates:
            wanted = wanted._replace(lent=self._lent(memory))
        differs = difference(trace, wanted)
        if trace.trains != self._trains:
            differs = f"it is of {'a training step' if trace.trains else 'an evaluation'}, which this is not"
        if differs is not None:
            raise ValueError(f"the program does not fit: {differs}; lower it from this step")
        return program

    def _sound(self, program: Program, lent: Iterable[Lent]) -> Verified:
        found = Verified(program, lent)
        if found.has_updates and self._whole is not None:
            raise ValueError(f"the program updates unit by unit, but {self._whole}; pass update=False to the schedule")
        return found


def difference(theirs: Trace, ours: Trace) -> str | None:
    """Where a program's trace is not the one it would run for; measured costs may differ."""
    for mine, other in itertools.zip_longest(ours.units, theirs.units):
        if mine != other:
            return f"it is of other units: it has {other} where there is {mine}"
    for field in ("mesh", "microbatches", "split", "update_when", "lent", "ordered", "order"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if field == "lent":
            mine, other = ([of[:2] for of in lent] for lent in (mine, other))
        if mine != other:
            shown = "" if field == "order" else f": it has {other!r}, here it is {mine!r}"
            return f"{field}{shown}"
    costless = [[visit._replace(cost=Cost()) for visit in trace.visits] for trace in (ours, theirs)]
    return "visits" if costless[0] != costless[1] else None


def agree(program: Program, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same program."""
    if comms.same_on_all(program.fingerprint(), "comparing programs"):
        return
    trace = program.trace  # in words, only to name the difference; measured costs may differ
    ops = {f"op {index}": describe(op, trace) for index, op in enumerate(program.ops)}
    rest = {part: str(getattr(trace, part)) for part in ("units", "microbatches", "mesh", "update_when")}
    comms.must_agree("the program", ops | rest | {"visits": str([(v.units, v.trained) for v in trace.visits])})
