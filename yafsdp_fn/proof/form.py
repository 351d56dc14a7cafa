"""Checks the rule `form`: fields are of their annotations, and name units, visits and slots that can be.

What an op means is asked only of programs in form.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

from yafsdp_fn.program.ops import OPS, AllReduce, Backward, Forward, MessageOp, Op, slot_fields
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.errors import refusal
from yafsdp_fn.util.schema import kinds


def _is_int(value: Any) -> bool:
    """Returns whether it is a number: True is none."""
    return type(value) is int


def _are_ints(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_int, value))


_NUMBER = "expected the number of a {}"
_FITS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_int, _NUMBER),
    int | None: (lambda value: value is None or _is_int(value), _NUMBER),
    bool: (lambda value: type(value) is bool, "expected True or False"),
    tuple[int, ...]: (_are_ints, "expected a tuple of ints, such as (0,)"),
}
"""Annotation -> whether a value fits, and what was expected. A list of units would not compare, a number not count."""

_LITERALS = {
    "source": "a gather reads from 'shard' or from 'node'",
    "over": "gradients are summed over 'replicas' or over 'stages'",
    "half": "expected 'both', 'inputs' or 'weights'",
}


# ---- The rule.


def check_form(program: Program) -> None:
    """Raises Refused for the first op that is not in form."""
    for at, op in enumerate(program.ops):
        why = _wrong_op(op, program.trace)
        if why is not None:
            raise refusal(program, "form", at, why, None, None)


def _wrong_op(op: Op, trace: Trace) -> str | None:
    """Returns what is wrong with an op. Types come first, since later checks rely on them."""
    if not isinstance(op, OPS):
        peer = hasattr(op, "stream")
        return "a peer's copy, which simulate and Plan.of take and no step runs" if peer else "not an op of a program"
    return _mistyped(op) or _impossible(op, trace) or _mispaired(op, trace)


def _impossible(op: Op, trace: Trace) -> str | None:
    """Returns why there can be no such op in a step: what it names is not there, or does not go together."""
    fields = op._asdict()
    # stages
    if isinstance(op, AllReduce) and op.over == "stages" and len(op.units) > 1:
        return f"units {op.units}: stages share units one by one"
    if isinstance(op, MessageOp):
        if trace.split is None:
            return "the trace has no pipeline stages"
        if not 0 <= op.flow < len(trace.split.flows):
            return f"there are flows 0 to {len(trace.split.flows) - 1}"
    # visits, and what their ops may have
    if "visit" in fields and not 0 <= fields["visit"] < len(trace.visits):
        return f"there are visits 0 to {len(trace.visits) - 1}"
    if isinstance(op, Forward) and op.keep and op.carry_slot is not None:
        return "a kept graph holds what it was given; a carry slot is for a visit that recomputes, keep=False"
    if fields.get("units") == ():
        return "it names no unit; leave the op out"
    if isinstance(op, Backward) and op.half == "weights" and op.carry_slot is not None:
        return "the gradients of weights need no carry: the half before them has read it"
    return None


def _mispaired(op: Op, trace: Trace) -> str | None:
    """Returns why units of an op cannot be, or do not go with its slots."""
    for units, slots in _pairs(op, trace):
        if any(not 0 <= unit < len(trace.units) for unit in units):
            return f"the trace has units 0 to {len(trace.units) - 1}"
        if len(set(units)) != len(units):
            return f"units {units} name one unit twice"
        if slots is None:
            continue
        if len(units) != len(slots):
            return f"{len(units)} units but {len(slots)} slots {slots}"
        if len(set(slots)) != len(slots):
            return f"slots {slots} name one slot twice"
        if min(slots, default=0) < 0:
            return f"slots {slots}: slots are numbered from 0"
    return None


# ---- Units and slots of an op, and the types of its fields.


def _pairs(op: Any, trace: Trace) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Yields units, and the slots that go with them, if any do."""
    half = op.half if isinstance(op, Backward) else "both"
    without = {"weights": "slot", "inputs": "grad slot"}.get(half)  # slots that the half of a backward has not
    several = False
    for field, (kind, _) in slot_fields(op):
        if kind == "carry slot":
            continue
        several = True
        units = trace.units_of(op)
        if hasattr(op, "visit") and kind == "grad slot":
            units = trace.visits[op.visit].trained
        if field != "early" or op.early:
            yield () if kind == without else units, getattr(op, field)
    if not several:
        yield getattr(op, "units", ()), None


def _mistyped(op: Op) -> str | None:
    """Describes the first field that does not fit its annotation, or numbers an impossible slot; None if all fit."""
    kind: Any = type(op)
    for field, fits, expected in _fields(kind):
        value = getattr(op, field)
        if not fits(value):
            return f"{field} {value!r}: {expected}"
        if field in ("takes", "gives") and (len(set(value)) < len(value) or min(value, default=0) < 0):
            return f"{field} {value}: expected different carry slots, numbered from 0"
        if field == "carry_slot" and value is not None and value < 0:
            return f"carry_slot {value}: slots are numbered from 0"
    return None


@functools.cache
def _fields(op: Any) -> list[tuple[str, Callable[[Any], bool], str]]:
    """Returns the fields of a kind of op, each with a test by its annotation, and what is expected in words."""
    out = []
    for field, kind in kinds(op).items():
        literals = get_args(kind)
        words = _LITERALS.get(field, f"expected one of {literals}")
        fits, expected = _FITS.get(kind, (literals.__contains__, words))
        out.append((field, fits, expected.format(field.replace("_", " "))))
    return out
