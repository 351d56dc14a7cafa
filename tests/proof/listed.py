"""Programs written as they are printed, a line for each op, and their edits: ops are named by how their line begins.

program = listed(trace, "gather a -> slot 0", "forward a in slot 0, keep graph", ...)
check(drop("gather a")(program), "forward a", "weights", "slot 0 holds no weights")
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Receive,
    Reduce,
    Refused,
    Send,
    Stash,
    Trace,
    Update,
    verify,
)

# ---- Lines, read as ops.


def listed(trace: Trace, text: str) -> Program:
    """The program of these lines, which is printed as they are."""
    lines = [line.strip() for line in text.strip().splitlines()]
    program = Program(trace, tuple(_op(line, trace) for line in lines))
    assert program.words() == lines
    return program


def _op(line: str, trace: Trace) -> Op:
    kind, _, rest = line.partition(" ")
    subject = re.split(r" \(|,? in | -> | <- ", rest)[0]
    ids = tuple(unit.id for name in subject.split(", ") for unit in trace.units if unit.name == name)
    visit = next((visit.id for visit in trace.visits if visit.name == subject), -1)
    in_microbatch = re.search(r"microbatch (\d+)", rest)
    microbatch = int(in_microbatch[1]) if in_microbatch else 0

    def slots(before: str) -> tuple[int, ...]:
        found = re.search(rf"{before} slots? (\d+(?:, \d+)*)", rest)
        return tuple(map(int, found[1].split(", "))) if found else ()

    def carry(before: str) -> Any:
        return next(iter(slots(f"{before} carry")), None)

    match kind:
        case "gather":
            return Gather(ids, slots("->"), "node" if " in node " in rest else "shard")
        case "stash":
            return Stash(ids, slots("<-"))
        case "forward":
            early = slots("begin grad")
            took = slots("from carry")
            gave = slots("to carry")
            return Forward(visit, slots(" in"), "keep graph" in rest, microbatch, carry("save in"), early, took, gave)
        case "backward":
            took = slots("from carry")
            gave = slots("to carry")
            return Backward(visit, slots(" in"), slots("-> grad"), microbatch, carry(","), took, gave)
        case "reduce":
            return Reduce(ids, slots("<- grad"))
        case "all-reduce":
            return AllReduce(ids)
        case "norm":
            return Norm(trace.trained)
        case "update":
            return Update(ids)
        case "offload":
            return Offload(visit, carry("<-"))
        case "fetch":
            return Fetch(visit, carry("->"))
        case "send":
            return Send(0, carry("<-"), microbatch, "gradient" in rest)
        case "receive":
            return Receive(0, carry("->"), microbatch, "gradient" in rest)
    raise ValueError(f"no op begins with {kind}: {line}")


# ---- Edits. "gather a, again": the second op that begins so.

Edit = Callable[[Program], Program]


def place(program: Program, start: str) -> int:
    """The number of the op whose line begins so: of the only one, or of the first or the second of two."""
    again = start.endswith(", again")
    start = start.removesuffix(", again")
    found = [number for number, words in enumerate(program.words()) if words.startswith(start)]
    assert again < len(found) <= 2, f"{start!r} begins the ops {found}"
    return found[again]


def drop(*starts: str) -> Edit:
    def edit(program: Program) -> Program:
        gone = {place(program, start) for start in starts}
        return program.with_ops(op for number, op in enumerate(program.ops) if number not in gone)

    return edit


def put(op: Op, before: str | None = None) -> Edit:
    """Adds an op before another, or as the last."""

    def edit(program: Program) -> Program:
        at = len(program.ops) if before is None else place(program, before)
        return program.with_ops((*program.ops[:at], op, *program.ops[at:]))

    return edit


def begin(op: Op) -> Edit:
    """Adds an op before all others."""
    return lambda program: program.with_ops((op, *program.ops))


def replace(start: str, op: Op) -> Edit:
    def edit(program: Program) -> Program:
        at = place(program, start)
        return program.with_ops((*program.ops[:at], op, *program.ops[at + 1 :]))

    return edit


def move(start: str, before: str) -> Edit:
    def edit(program: Program) -> Program:
        at = place(program, start)
        to = place(program, before)
        rest = [op for number, op in enumerate(program.ops) if number != at]
        assert to < at
        return program.with_ops((*rest[:to], program.ops[at], *rest[to:]))

    return edit


# ---- What is said to them.


def refusal(program: Program) -> Refused:
    with pytest.raises(Refused) as caught:
        verify(program)
    return caught.value


def check(program: Program, at: str | int, rule: str, message: str) -> Refused:
    """Checks that `program` is refused by `rule` at the op whose line begins with `at`, or has this number, -1 at the
    end of the program; returns the refusal."""
    refused = refusal(program)
    number = at if isinstance(at, int) else place(program, at)
    assert (refused.op, refused.rule) == (number, rule), refused
    first = str(refused).splitlines()[0]
    assert first.startswith("end of program: " if number < 0 else f"op {number} ("), first
    assert f"rule '{rule}': " in first and re.search(message, first), first
    return refused
