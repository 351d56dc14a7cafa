"""Random pipelines: of every order and sharding, as built, and with their calls, messages and ops changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.schedules.mutants import mutant
from tests.schedules.stages.pipelines import ORDERS, homes
from tests.schedules.traces import cut, model, on
from yafsdp_fn.schedules import Pipeline, Program, Receive, Refused, Schedule, Send, Trace, UpdateWhen
from yafsdp_fn.schedules.split import Call
from yafsdp_fn.schedules.stages import calls
from yafsdp_fn.schedules.stages.builders import pipeline
from yafsdp_fn.schedules.stages.messages import with_messages

Lists = list[list[Any]]
"""Of each stage, its calls and messages."""


def step_of(rng: random.Random, order: str, mesh: str, updates: UpdateWhen) -> Trace:
    """A small step on two stages or three; some units are on several stages, trained by all of them or by some."""
    places = homes(order, rng.choice((2, 2, 2, 3)))
    count = len(places)
    trace = model(max(0, count - 2) + rng.choice((0, 0, 0, 1)), rng.choice((1, 2, 2, 3)), tied=rng.random() < 0.4)
    if rng.random() < 0.15:  # a visit need not train what others train
        number = rng.choice([visit.id for visit in trace.visits])
        some = [visit._replace(trained=visit.trained * (visit.id != number)) for visit in trace.visits]
        trace = trace._replace(visits=tuple(some))
    if rng.random() < 0.15:  # and what nothing trains may be all that a stage has
        number = rng.randrange(len(trace.units))
        units = [unit._replace(trainable=unit.trainable and unit.id != number) for unit in trace.units]
        some = [visit._replace(trained=tuple(u for u in visit.trained if u != number)) for visit in trace.visits]
        trace = trace._replace(units=tuple(units), visits=tuple(some))
    skips = [(0, count - 1)] if count > 2 and rng.random() < 0.3 else []
    return cut(on(trace, mesh, updates), places, skips)


def changed_lists(lists: Lists, rng: random.Random) -> Lists:
    """One call or message of a stage left out, doubled, or moved; a backward in halves, a half of another kind."""
    row = rng.choice(lists)
    at, to = (rng.randrange(len(row)) for _ in range(2))
    way = rng.choice(("drop", "double", "move", "move", "swap", "swap", "halves", "half"))
    if way == "halves" and isinstance(row[at], Call) and row[at].kind == "backward":
        row[at : at + 1] = [row[at]._replace(kind=half) for half in ("inputs", "weights")]
    elif way == "half" and isinstance(row[at], Call) and row[at].kind != "forward":
        row[at] = row[at]._replace(kind=rng.choice(("backward", "inputs", "weights")))
    elif way == "double":
        row.insert(to, row[at])
    elif way == "swap":
        at = min(at, len(row) - 2)
        row[at : at + 2] = reversed(row[at : at + 2])
    else:
        item = row.pop(at)
        if way != "drop":
            row.insert(to, item)
    return lists


def changed_messages(made: Pipeline, rng: random.Random) -> Pipeline:
    """Two messages from one stage to another exchanged on both, or a parcel of one stage in another carry slot."""
    programs = list(made.stages)
    stage = rng.randrange(len(programs))
    here = programs[stage]
    if rng.random() < 0.6:
        pairs = [pair for op in here.ops for pair in here.trace.parcels_of(op)]
        if not pairs:
            return made
        parcel, new = rng.choice(pairs)[0], rng.randrange(len({slot for _, slot in pairs}) + 1)
        programs[stage] = Program(here.trace, tuple(_in_slot(here.trace, op, parcel, new) for op in here.ops))
        return made._replace(stages=tuple(programs))
    sends = [op for op in here.ops if isinstance(op, Send)]
    if len(sends) > 1:
        at = rng.randrange(len(sends) - 1)
        two = sends[at].parcel, sends[at + 1].parcel
        for number, program in enumerate(programs):
            for kind in (Send, Receive):
                places = [k for k, op in enumerate(program.ops) if isinstance(op, kind) and op.parcel in two]
                if len(places) == 2 and (number == stage) == (kind is Send):
                    ops = list(program.ops)
                    ops[places[0]], ops[places[1]] = ops[places[1]], ops[places[0]]
                    programs[number] = program = Program(program.trace, tuple(ops))
    return made._replace(stages=tuple(programs))


def _in_slot(trace: Trace, op: Any, parcel: Any, new: int) -> Any:
    """`op` with `parcel` in slot `new`, if it is of that."""
    if isinstance(op, Send | Receive):
        return op._replace(carry_slot=new) if op.parcel == parcel else op
    slots = [new if other == parcel else slot for other, slot in trace.parcels_of(op)]
    if not slots:
        return op
    return op._replace(takes=tuple(slots[: len(op.takes)]), gives=tuple(slots[len(op.takes) :]))


def changed_program(made: Pipeline, rng: random.Random) -> Pipeline:
    """An op of one stage changed (mutants.py)."""
    stage = rng.randrange(len(made.stages))
    programs = list(made.stages)
    programs[stage] = mutant(programs[stage], rng)
    return made._replace(stages=tuple(programs))


def a_pipeline(
    rng: random.Random, sharding: Callable[[bool], tuple[Schedule, str]], in_form: Callable[[Any], bool]
) -> Any:
    """As built, or changed up to twice; None where what came of it is no pipeline."""
    updates: UpdateWhen = rng.choice(("never", "after norm", "any time"))
    schedule, mesh = sharding(updates != "never" and rng.random() < 0.7)
    order = rng.choice(ORDERS)
    trace = step_of(rng, order, mesh, updates)
    assert trace.split is not None
    lists: Lists = [
        list(items) for items in with_messages(trace.split, getattr(calls, order)(trace.split, trace.microbatches))
    ]
    changes = rng.choice((0, 1, 1, 1, 1, 2, 2))
    try:
        while changes and rng.random() < 0.25:
            lists = changed_lists(lists, rng)
            changes -= 1
        made = pipeline(trace, lists, schedule)
    except (Refused, LookupError, ValueError, AssertionError):
        return None
    for _ in range(changes):
        if in_form(made):
            made = (changed_messages if rng.random() < 0.4 else changed_program)(made, rng)
    return made
