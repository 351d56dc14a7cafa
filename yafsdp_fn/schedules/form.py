"""The rule `form`: ops name units, visits and slots that exist, as many slots as units, no slot twice.

What an op means is asked only of programs in form.
"""

from __future__ import annotations

from yafsdp_fn.schedules.ops import (
    OPS,
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Reduce,
    Stash,
    Update,
)
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Refused, drawn
from yafsdp_fn.schedules.trace import Trace

Pairs = list[tuple[tuple[int, ...], tuple[int, ...] | None]]
"""Units, and the slots that go with them, if any do."""


def check_form(program: Program) -> None:
    """Raises Refused for the first op that is not in form."""
    for index, op in enumerate(program.ops):
        why = _wrong(op, program.trace)
        if why is not None:
            raise Refused("form", index, drawn(program, "form", index, why, None, None))


def _wrong(op: Op, trace: Trace) -> str | None:
    if not isinstance(op, tuple(OPS.values())):
        peer = hasattr(op, "stream")
        return "a peer's copy, which simulate and Plan.of take and no step runs" if peer else "not an op of a program"
    why = _mistyped(op)
    if why is not None:
        return why
    pairs: Pairs = []
    match op:
        case Gather(ids, slots, source):
            if source not in ("shard", "node"):
                return f"source {source!r}: a gather reads from 'shard' or from 'node'"
            pairs = [(ids, slots)]
        case Stash(ids, slots) | Reduce(ids, slots):
            pairs = [(ids, slots)]
        case AllReduce(ids) | Norm(ids) | Update(ids):
            pairs = [(ids, None)]
        case Forward(visit) | Backward(visit) | Offload(visit) | Fetch(visit):
            if not 0 <= visit < len(trace.visits):
                return f"there are visits 0 to {len(trace.visits) - 1}"
            if isinstance(op, Forward) and op.keep and op.carry_slot is not None:
                return "a kept graph holds what it was given; a carry slot is for a visit that recomputes, keep=False"
            if isinstance(op, Forward | Backward):
                pairs = [(trace.visits[visit].units, op.slots)]
            if isinstance(op, Backward):
                pairs.append((trace.visits[visit].trained, op.grad_slots))
    for ids, at in pairs:
        if any(not 0 <= unit < len(trace.units) for unit in ids):
            return f"the trace has units 0 to {len(trace.units) - 1}"
        if len(set(ids)) != len(ids):
            return f"units {ids} name one unit twice"
        if at is not None and len(ids) != len(at):
            return f"{len(ids)} units but {len(at)} slots {at}"
        if at is not None and len(set(at)) != len(at):
            return f"slots {at} name one slot twice"
    return None


def _mistyped(op: Op) -> str | None:
    """Units and slots are tuples of ints: a list would not compare, a number not be counted."""
    for field, value in op._asdict().items():
        if field in ("units", "slots", "grad_slots"):
            if not isinstance(value, tuple) or any(type(item) is not int for item in value):
                return f"{field} {value!r}: expected a tuple of ints, such as (0,)"
        elif field == "visit" and type(value) is not int:
            return f"visit {value!r}: expected the number of a visit"
        elif field == "keep" and type(value) is not bool:
            return f"keep {value!r}: expected True or False"
        elif (
            field == "carry_slot" and type(value) is not int and (value is not None or isinstance(op, Offload | Fetch))
        ):
            return f"carry_slot {value!r}: expected the number of a carry slot"
    return None
