"""Programs that differ a little from a given one: an op dropped, doubled, moved, swapped, added, or changed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Receive,
    Reduce,
    Send,
    Stash,
    Trace,
    Update,
)


def edits(op: Op, trace: Trace) -> Iterator[Op]:
    """`op` with one field, or one number in a field, changed."""
    numbers = range(-1, len(trace.units) + 2)
    for name, value in op._asdict().items():
        if name == "half":
            yield from (op._replace(half=half) for half in ("both", "inputs", "weights") if half != value)
        elif name == "carry_slot":
            yield from (op._replace(**{name: new}) for new in (None, 0, 1) if new != value)
        elif isinstance(value, bool):
            yield op._replace(**{name: not value})
        elif isinstance(value, str):
            yield op._replace(**{name: "node" if value == "shard" else "shard"})
        elif isinstance(value, int):
            yield from (op._replace(**{name: n}) for n in range(-1, len(trace.visits) + 1) if n != value)
        else:
            for at, old in enumerate(value):
                for new in numbers:
                    if new != old:
                        yield op._replace(**{name: (*value[:at], new, *value[at + 1 :])})
            yield op._replace(**{name: value[1:]})
            yield op._replace(**{name: (*value, 0)})


def additions(program: Program) -> list[Op]:
    """Ops of every kind that the program may lack."""
    units = range(len(program.trace.units))
    slots = sorted(program.slot_bytes())[:2]
    ops: list[Op] = [Norm(tuple(units)), Norm(tuple(u for u in units if program.trace.units[u].trainable))]
    for u in units:
        ops += [AllReduce((u,)), Update((u,))]
        ops += [Update((u,), 1), Update((u,), 2), Exchange((u,), 0), Exchange((u,), 1)] * bool(program.trace.lent)
        for slot in slots:
            ops += [Gather((u,), (slot,)), Gather((u,), (slot,), "node"), Stash((u,), (slot,))]
    if program.host_bytes():
        ops += [kind(visit.id, slot) for visit in program.trace.visits for slot in (0, 1) for kind in (Offload, Fetch)]
    if (split := program.trace.split) is not None:
        ways = [(flow, m, back) for flow in range(len(split.flows)) for m in (0, 1) for back in (False, True)]
        ops += [kind(flow, slot, m, back) for flow, m, back in ways for slot in (0, 1) for kind in (Send, Receive)]
    return ops


def mutants(program: Program) -> Iterator[Program]:
    """Programs that differ in one op, or in the places of two."""
    trace = program.trace
    ops = program.ops
    for at, op in enumerate(ops):
        rest = (*ops[:at], *ops[at + 1 :])
        yield Program(trace, rest)
        for to in range(len(ops)):
            yield Program(trace, (*ops[:to], op, *ops[to:]))
            if to not in (at, at - 1):
                yield Program(trace, (*rest[:to], op, *rest[to:]))
            if at + 1 < to:
                yield Program(trace, (*ops[:at], ops[to], *ops[at + 1 : to], op, *ops[to + 1 :]))
        for new in edits(op, trace):
            yield Program(trace, (*ops[:at], new, *ops[at + 1 :]))
    for new in additions(program):
        for to in range(len(ops) + 1):
            yield Program(trace, (*ops[:to], new, *ops[to:]))


def mutant(program: Program, rng: random.Random) -> Program:
    """One such change at random; those that are often harmless more often."""
    trace = program.trace
    ops = program.ops
    at, to = (rng.randrange(len(ops)) for _ in range(2))
    op = ops[at]
    rest = (*ops[:at], *ops[at + 1 :])
    kind = rng.choice(("drop", "double", "move", "move", "edit", "edit", "add", "add", "relocate", "relocate"))
    if kind == "drop":
        return Program(trace, rest)
    if kind == "double":
        return Program(trace, (*ops[:to], op, *ops[to:]))
    if kind == "move":
        return Program(trace, (*rest[:to], op, *rest[to:]))
    if kind == "edit":
        return Program(trace, (*ops[:at], rng.choice(list(edits(op, trace))), *ops[at + 1 :]))
    if kind == "add":
        return Program(trace, (*ops[:to], rng.choice(additions(program)), *ops[to:]))
    return rng.choice([program, *relocated(program)])


def relocated(program: Program) -> Iterator[Program]:
    """Programs where one gather goes to another slot, and with it what reads it, or one gradient does."""
    slots = range(len(program.trace.units) + 2)
    for at, op in enumerate(program.ops):
        if isinstance(op, Gather):
            yield from (_moved(program, range(at, len(program.ops)), op.units[0], "slots", new) for new in slots)
        if isinstance(op, Reduce):
            yield from (_moved(program, range(at, -1, -1), op.units[0], "grad_slots", new) for new in slots)


def _moved(program: Program, span: range, unit: int, field: str, new: int) -> Program:
    """The ops of `span` with `unit` in slot `new`, up to the next gather (or reduction) of that unit."""
    ops = list(program.ops)
    for k in span:
        op = ops[k]
        kinds = (Gather, Stash, Forward, Backward) if field == "slots" else (Reduce, Backward)
        if not isinstance(op, kinds):
            continue
        visit = program.trace.visits[op.visit] if isinstance(op, Forward | Backward) else None
        ids = op.units if visit is None else visit.units if field == "slots" else visit.trained
        if unit not in ids or not getattr(op, field):  # a half of a backward has slots of one kind
            continue
        if k != span.start and isinstance(op, Gather | Reduce):
            break
        old = getattr(op, field)
        ops[k] = op._replace(**{field: tuple(new if i == unit else slot for i, slot in zip(ids, old, strict=True))})
    return Program(program.trace, tuple(ops))
