"""Programs as JSON, and the hash that ranks compare."""

import hashlib
import json
import reprlib
from collections.abc import Sequence
from typing import Any

from yafsdp_fn import strict_json
from yafsdp_fn.schedules.ops import OPS, Op
from yafsdp_fn.schedules.sound_trace import check_trace
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.schedules.typed import typed


def fingerprint(trace: Trace, ops: Sequence[Op]) -> str:
    visits = [(visit.units, visit.trained) for visit in trace.visits]
    lent = [(of.unit, of.parts) for of in trace.lent]
    step = [trace.microbatches, trace.mesh, trace.update_when, trace.ordered, trace.split, trace.stage]
    agreed = [trace.units, visits, *step, lent, _ops(ops)]
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()


def to_json(trace: Trace, ops: Sequence[Op]) -> str:
    return json.dumps(as_data(trace, ops))


def from_json(text: str) -> tuple[Trace, tuple[Op, ...]]:
    """What `to_json` wrote, each value of the type of its field, and a trace whose numbers name what is there; whether
    the ops are right is for `verify` to say. Raises ValueError with the place of what is wrong."""
    try:
        return checked(strict_json.loads(text))
    except (TypeError, ValueError) as error:  # TypeError: `text` is no text
        raise ValueError(f"not a program in JSON: {error}") from error


def checked(data: Any) -> tuple[Trace, tuple[Op, ...]]:
    """The same of what JSON has already been read as."""
    if not isinstance(data, dict) or data.keys() != {"trace", "ops"} or not isinstance(data["ops"], list):
        raise ValueError("expected an object of a trace and a list of ops")
    try:
        trace = typed(Trace, data["trace"])
    except ValueError as error:
        raise ValueError(f"trace{error}") from None
    check_trace(trace)
    return trace, tuple([_op(at, item) for at, item in enumerate(data["ops"])])


def as_data(trace: Trace, ops: Sequence[Op]) -> dict[str, Any]:
    """What `checked` takes, for JSON."""
    return {"trace": trace._asdict(), "ops": _ops(ops)}


def _ops(ops: Sequence[Op]) -> list[list[Any]]:
    return [[type(op).__name__.lower(), *op] for op in ops]


def _op(at: int, item: Any) -> Op:
    if not (isinstance(item, list) and item and isinstance(item[0], str) and item[0] in OPS):
        raise ValueError(f"ops[{at}]: expected a list that begins with an op's name, got {reprlib.repr(item)}")
    try:
        op: Op = typed(OPS[item[0]], item[1:])
        return op
    except ValueError as error:
        raise ValueError(f"ops[{at}], {item[0]}{error}") from None
