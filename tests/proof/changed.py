"""Random pipelines: of every order and sharding, as built, and with their calls, messages and ops changed."""

from __future__ import annotations

import random
from typing import Any

from tests.pipelines.orders import ORDERS, homes
from tests.program.traces import cut, model, on, trace_of, unit
from tests.proof.mutants import mutant
from tests.schedules.drawn import ON_STAGES, builder
from yafsdp_fn.pipelines import orders
from yafsdp_fn.pipelines.messages import with_messages
from yafsdp_fn.program.split import Call
from yafsdp_fn.proof.form import check_form
from yafsdp_fn.schedules import Program, Receive, Refused, Send, Trace, Update, UpdateWhen

Lists = list[list[Any]]
"""Of each stage, its calls and messages."""


def step_of(rng: random.Random, order: str, mesh: str, updates: UpdateWhen) -> Trace:
    """A small step on two stages or three, with what is seldom there: units on several stages, trained by all or by
    some, or visited on both sides of a border, stages that train nothing, units that no visit uses, flows without a
    gradient, units that a stage has in vain, since none of its visits trains them."""
    places = homes(order, rng.choice((2, 2, 3)))
    count = len(places)
    plain = model(max(0, count - 2) + rng.choice((0, 0, 1, 2)), rng.choice((1, 2, 2, 3)), tied=rng.random() < 0.4)
    uses = [visit.units for visit in plain.visits]
    units = list(plain.units)
    starts = [len(uses) * k // count for k in range(count)]
    for border in starts[1:]:
        if rng.random() < 0.3:
            uses[border] = (*uses[border - 1], *uses[border])[: rng.choice((1, 2))]
    uses = [tuple(dict.fromkeys(of)) for of in uses]
    units += [unit(len(plain.units) + k, f"spare {k}") for k in range(rng.choice((0, 0, 1, 1, 2)))]
    of_stage = [
        {
            u
            for k, home in enumerate(places)
            if home == stage
            for of in uses[slice(*([*starts, None])[k : k + 2])]
            for u in of
        }
        for stage in range(max(places) + 1)
    ]
    frozen = rng.choice([of_stage[0], *of_stage]) if rng.random() < 0.5 else set()
    if rng.random() < 0.15:
        frozen = frozen | {rng.randrange(len(units))}
    units = [record._replace(trainable=record.id not in frozen) for record in units]
    trace = trace_of(units, uses, plain.microbatches)
    if rng.random() < 0.15:
        number = rng.randrange(len(uses))
        visits = [visit._replace(trained=visit.trained * (visit.id != number)) for visit in trace.visits]
        trace = trace._replace(visits=tuple(visits))
    skips = [(0, count - 1)] if count > 2 and rng.random() < 0.4 else []
    trace = cut(on(trace, mesh, updates), places, skips, starts)
    assert trace.split is not None
    trains = [any(visit.trained for visit in trace.visits[slice(*ends)]) for ends in trace.split.segments]
    flows = []
    smooth = list(trains)  # whether what a segment gives has a gradient
    for flow in trace.split.flows:
        passes = smooth[flow.source] and rng.random() < 0.9
        smooth[flow.target] |= passes
        flows.append(flow._replace(grad_bytes=32 * passes))
    seen = {u for of in uses for u in of}
    unused = [(u.id, rng.randrange(max(places) + 1)) for u in units if u.id not in seen]
    split = trace.split._replace(flows=tuple(flows), unused=tuple((u, stage) for u, stage in unused if stage))
    return trace._replace(split=split)


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


def changed_messages(made: Program, rng: random.Random) -> Program:
    """Two messages from one stage to another exchanged on both, or what one stage takes in another carry slot."""
    stage = rng.randrange(len(made.stages))
    here = made.by_stage[stage]
    if rng.random() < 0.6:
        pairs = [pair for op in here.ops for pair in here.trace.messages_of(op)]
        if not pairs:
            return made
        message = rng.choice(pairs)[0]
        new = rng.randrange(len({slot for _, slot in pairs}) + 1)
        return made.with_ops((_in_slot(here.trace, op, message, new) for op in here.ops), stage)
    sends = [op for op in here.ops if isinstance(op, Send)]
    if len(sends) > 1:
        at = rng.randrange(len(sends) - 1)
        two = sends[at].message, sends[at + 1].message
        for number in range(len(made.stages)):
            for kind in (Send, Receive):
                ops = list(made.stages[number])
                places = [k for k, op in enumerate(ops) if isinstance(op, kind) and op.message in two]
                if len(places) == 2 and (number == stage) == (kind is Send):
                    ops[places[0]], ops[places[1]] = ops[places[1]], ops[places[0]]
                    made = made.with_ops(ops, number)
    return made


def _in_slot(trace: Trace, op: Any, message: Any, new: int) -> Any:
    """`op` with `message` in slot `new`, if it is of that."""
    if isinstance(op, Send | Receive):
        return op._replace(carry_slot=new) if op.message == message else op
    slots = [new if other == message else slot for other, slot in trace.messages_of(op)]
    if not slots:
        return op
    return op._replace(takes=tuple(slots[: len(op.takes)]), gives=tuple(slots[len(op.takes) :]))


def changed_program(made: Program, rng: random.Random) -> Program:
    """An op of one stage changed (mutants.py)."""
    stage = rng.randrange(len(made.stages))
    return made.with_ops(mutant(made.by_stage[stage], rng).ops, stage)


def changed_order(made: Program, rng: random.Random) -> Program:
    """A message of a stage that is sent later, or received earlier, or an update that comes earlier."""
    stage = rng.randrange(len(made.stages))
    ops = list(made.stages[stage])
    places = [at for at, op in enumerate(ops) if isinstance(op, Send | Receive | Update)]
    if places:
        at = rng.choice(places)
        op = ops.pop(at)
        ops.insert(rng.randint(at, len(ops)) if isinstance(op, Send) else rng.randint(0, at), op)
    return made.with_ops(ops, stage)


def any_change(made: Program, rng: random.Random) -> Program:
    return rng.choice((changed_messages, changed_order, changed_order, changed_program))(made, rng)


def in_form(made: Program) -> bool:
    """Whether it is a program at all: others are not changed further."""
    try:
        for program in made.by_stage:
            check_form(program)
    except Refused:
        return False
    return True


def a_pipeline(rng: random.Random, least: int = 0) -> Program | None:
    """As built, or changed up to twice; None where what came of it is no pipeline. least: changes"""
    updates: UpdateWhen = rng.choice(("never", "after norm"))
    schedule, mesh = builder(rng, updates != "never" and rng.random() < 0.7, ON_STAGES)
    order = rng.choice(ORDERS)
    trace = step_of(rng, order, mesh, updates)
    assert trace.split is not None
    lists: Lists = [
        list(items) for items in with_messages(trace.split, orders.ORDERS[order](trace.split, trace.microbatches))
    ]
    changes = max(least, rng.choice((0, 1, 1, 1, 1, 2, 2)))
    try:
        while changes and rng.random() < 0.25:
            lists = changed_lists(lists, rng)
            changes -= 1
        made = orders.pipeline(trace, lists, schedule)
    except (Refused, LookupError, ValueError, AssertionError):
        return None
    for _ in range(changes):
        if in_form(made):
            made = any_change(made, rng)
    return made
