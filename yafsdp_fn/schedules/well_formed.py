"""The rule `form`: ops name units, visits and slots that can be, one unit at least, as many slots as units, none twice.

What an op means is asked only of programs in form.
"""

from yafsdp_fn.schedules.further_ops import AllReduce, Receive, Send
from yafsdp_fn.schedules.ops import OPS, Backward, Forward, Gather, Op
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Rules
from yafsdp_fn.schedules.trace import Trace

LISTS = frozenset({"units", "slots", "grad_slots", "early", "takes", "gives"})
KNOWN_FIELDS = LISTS | {"visit", "microbatch", "keep", "carry_slot", "source", "part", "half", "flow", "back", "over"}
"""Those whose values are checked here."""


def check_form(program: Program) -> None:
    """Raises Refused for the first op that is not in form."""
    for index, op in enumerate(program.ops):
        if (why := _wrong(op, program.trace)) is not None:
            Rules(program, index).refuse("form", why)


def _wrong(op: Op, trace: Trace) -> str | None:
    if not isinstance(op, tuple(OPS.values())):
        peer = hasattr(op, "stream")
        return "a peer's copy, which simulate and Plan.of take and no step runs" if peer else "not an op of a program"
    if (why := _mistyped(op)) is not None:
        return why
    fields = op._asdict()
    if isinstance(op, Gather) and op.source not in ("shard", "node"):
        return f"source {op.source!r}: a gather reads from 'shard' or from 'node'"
    if isinstance(op, AllReduce) and op.over not in ("replicas", "stages"):
        return f"over {op.over!r}: gradients are summed over 'replicas' or over 'stages'"
    if isinstance(op, AllReduce) and op.over == "stages" and len(op.units) > 1:
        return f"units {op.units}: stages share units one by one"
    if isinstance(op, Backward) and op.half not in ("both", "inputs", "weights"):
        return f"half {op.half!r}: expected 'both', 'inputs' or 'weights'"
    if isinstance(op, Send | Receive) and trace.split is None:
        return "the trace has no pipeline stages"
    if isinstance(op, Send | Receive) and trace.split and not 0 <= op.flow < len(trace.split.flows):
        return f"there are flows 0 to {len(trace.split.flows) - 1}"
    if "visit" in fields and not 0 <= fields["visit"] < len(trace.visits):
        return f"there are visits 0 to {len(trace.visits) - 1}"
    if isinstance(op, Forward) and op.keep and op.carry_slot is not None:
        return "a kept graph holds what it was given; a carry slot is for a visit that recomputes, keep=False"
    if fields.get("units") == ():
        return "it names no unit; leave the op out"
    # units, and the slots that go with them, if any do
    pairs = [(fields.get("units", ()), fields.get("slots", fields.get("grad_slots")))]
    if isinstance(op, Forward | Backward):
        visit = trace.visits[op.visit]
        half = op.half if isinstance(op, Backward) else "both"
        if half == "weights" and op.carry_slot is not None:
            return "the gradients of weights need no carry: the half before them has read it"
        pairs = [(visit.units if half != "weights" else (), op.slots)]
        if isinstance(op, Backward):
            pairs.append((visit.trained if half != "inputs" else (), op.grad_slots))
        elif op.early:
            pairs.append((visit.trained, op.early))
    for ids, at in pairs:
        if any(not 0 <= unit < len(trace.units) for unit in ids):
            return f"the trace has units 0 to {len(trace.units) - 1}"
        if len(set(ids)) != len(ids):
            return f"units {ids} name one unit twice"
        if at is None:
            continue
        if len(ids) != len(at):
            return f"{len(ids)} units but {len(at)} slots {at}"
        if len(set(at)) != len(at):
            return f"slots {at} name one slot twice"
        if min(at, default=0) < 0:
            return f"slots {at}: slots are numbered from 0"
    return None


def _mistyped(op: Op) -> str | None:
    """Units and slots are tuples of ints: a list would not compare, a number not be counted."""
    for field, value in op._asdict().items():
        if field in LISTS:
            if not isinstance(value, tuple) or any(type(item) is not int for item in value):
                return f"{field} {value!r}: expected a tuple of ints, such as (0,)"
            if field in ("takes", "gives") and (len(set(value)) < len(value) or min(value, default=0) < 0):
                return f"{field} {value}: expected different carry slots, numbered from 0"
        elif field in ("visit", "microbatch", "part", "flow") and type(value) is not int:
            return f"{field} {value!r}: expected the number of a {field}"
        elif field in ("keep", "back") and type(value) is not bool:
            return f"{field} {value!r}: expected True or False"
        elif field == "carry_slot" and (value is not None or not isinstance(op, Forward | Backward)):
            if type(value) is not int:
                return f"carry_slot {value!r}: expected the number of a carry slot"
            if value < 0:
                return f"carry_slot {value}: slots are numbered from 0"
    return None
