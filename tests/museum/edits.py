"""Small changes of programs and pipelines: what a bug would have done to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from yafsdp_fn.schedules import Backward, Forward, Op, Program

Edit = Callable[[list[Op]], object]


def find(program: Program, kind: type[Any], name: str = "", microbatch: int = 0, nth: int = 0) -> int:
    """The `nth` op of a kind, of the unit or visit of that name; computes of a microbatch."""
    trace = program.trace
    found = []
    for at, op in enumerate(program.ops):
        if not isinstance(op, kind):
            continue
        if isinstance(op, Forward | Backward):
            if op.microbatch == microbatch and trace.visits[op.visit].name == name:
                found.append(at)
        elif not name or name in [trace.units[unit].name for unit in op.units]:
            found.append(at)
    return found[nth]


def changed(program: Program, *edits: Edit) -> Program:
    ops = list(program.ops)
    for edit in edits:
        edit(ops)
    return Program(program.trace, tuple(ops))


def on_stage(pipeline: Program, stage: int, *edits: Edit) -> Program:
    """The pipeline, the program of one stage of it changed."""
    return pipeline.with_ops(changed(pipeline.by_stage[stage], *edits).ops, stage)


def drop(at: int) -> Edit:
    return lambda ops: ops.pop(at)


def move(at: int, to: int) -> Edit:
    return lambda ops: ops.insert(to, ops.pop(at))


def with_(at: int, **fields: Any) -> Edit:
    return lambda ops: ops.__setitem__(at, ops[at]._replace(**fields))


def without(kind: type[Any], keep: Iterable[Op] = ()) -> Edit:
    kept = list(keep)
    return lambda ops: ops.__setitem__(slice(None), [op for op in ops if not isinstance(op, kind) or op in kept])
