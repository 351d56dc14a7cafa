"""Programs as JSON, and the hash that ranks compare."""

import hashlib
import itertools
import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from yafsdp_fn.program.measured import KERNELS
from yafsdp_fn.program.ops import OPS, Op
from yafsdp_fn.program.split import Split
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.mesh_axes import MOST_RANKS, AxisCollective, ranks_on
from yafsdp_fn.util.schema import typed_at

# ---- Programs are read by their annotations (util/schema.py), and `check_trace` says that a trace can be: `verify`
# proves ops against it, and takes its word for what the step is.

# ---- a trace that came as text

MOST_EMPTY = 2**10
"""Microbatches in which nothing is visited."""


def check_trace(trace: Trace) -> None:
    """Raises ValueError with the first thing that is wrong, and its place."""
    for check in (_wrong_visits, _wrong_order, _wrong_stages, _wrong_optimizer):
        for why in check(trace):
            raise ValueError(f"trace.{why}")


def _wrong_visits(trace: Trace) -> Iterator[str]:
    """Yields what is wrong with units, with visits to them, and with what the loss does between visits."""
    for at, unit in enumerate(trace.units):
        if unit.id != at:
            yield f"units[{at}].id: expected {at}, its place, got {unit.id}"
        if not _some_of(dict(trace.inside), unit.over):
            yield f"units[{at}].over: expected axes inside blocks, each once, got {', '.join(unit.over)}"
    units = range(len(trace.units))
    visits = range(len(trace.visits))
    for at, visit in enumerate(trace.visits):
        where = f"visits[{at}]"
        if visit.id != at:
            yield f"{where}.id: expected {at}, its place, got {visit.id}"
        if not _some_of(units, visit.units):
            yield f"{where}.units: expected different ones of the {len(units)} units"
        if not _some_of(visit.units, visit.trained):
            yield f"{where}.trained: expected different ones of its units"
        for number, argument in enumerate(visit.cost.arguments):
            if not all(made in visits for made in argument.made):
                yield f"{where}.cost.arguments[{number}].made: expected some of the {len(visits)} visits"
        yield from _wrong_calls(where, (*visit.collectives, *visit.adjoints), trace)
        for number in visit.trained:
            if not trace.units[number].trainable:
                yield f"{where}.trained: units[{number}] is not trainable"
    for at, (after, forward, backward) in enumerate(trace.between):
        if not -1 <= after < len(visits):
            yield f"between[{at}].after: expected -1 or one of the {len(visits)} visits, got {after}"
        yield from _wrong_calls(f"between[{at}]", (*forward, *backward), trace)
    if not all(visit in visits for visit in trace.loss_of):
        yield f"loss_of: expected some of the {len(visits)} visits"


def _wrong_order(trace: Trace) -> Iterator[str]:
    """Yields what is wrong with the order of computes."""
    units = range(len(trace.units))
    computes = [compute[:3] for compute in trace.order]
    if trace.microbatches > max(len(computes), MOST_EMPTY):
        yield f"microbatches: {trace.microbatches} of {len(computes)} computes"
    if len(set(computes)) < len(computes):
        yield "order: one of its computes is there twice"
    for at, (kind, visit, microbatch, closes) in enumerate(trace.order):
        if not (0 <= visit < len(trace.visits) and 0 <= microbatch < trace.microbatches):
            yield f"order[{at}]: {kind} of visit {visit} in microbatch {microbatch}: there is no such"
        if not all(unit in units for unit in closes):
            yield f"order[{at}].closes: expected some of the {len(units)} units"


def _wrong_stages(trace: Trace) -> Iterator[str]:
    """Yields what is wrong with stages and mesh."""
    if trace.split is not None:
        yield from _wrong_split(trace.split, trace)
    elif trace.stage is not None:
        yield f"stage: {trace.stage} of a step that is not split"
    if len(dict(trace.mesh)) < len(trace.mesh):
        yield "mesh: expected axes of different names"
    if ranks_on(trace.mesh) > MOST_RANKS:
        yield f"mesh: at most {MOST_RANKS} ranks"


def _wrong_optimizer(trace: Trace) -> Iterator[str]:
    """Yields what is wrong with costs and the optimizer."""
    for at, (_, _, parts) in enumerate(trace.optimizer.shards):
        if trace.ranks % parts:
            yield f"optimizer.shards[{at}]: expected parts that {trace.ranks} ranks divide into, got {parts}"
    if trace.kernels not in KERNELS:
        yield f"kernels: expected fused, eager or pieces, got {reprlib.repr(trace.kernels)}"
    if len({lent.unit for lent in trace.lent}) < len(trace.lent):
        yield "lent: one unit is there twice"
    for at, lent in enumerate(trace.lent):
        if not 0 <= lent.unit < len(trace.units):
            yield f"lent[{at}].unit: there are units 0 to {len(trace.units) - 1}, got {lent.unit}"


def _some_of(known: Collection[Any], given: Sequence[Any]) -> bool:
    """Says whether all that is given is known, and each of it given once."""
    return all(each in known for each in given) and len(set(given)) == len(given)


def _wrong_calls(where: str, calls: Iterable[AxisCollective], trace: Trace) -> Iterator[str]:
    """Yields what is wrong with collectives inside blocks."""
    inside = dict(trace.inside)
    for call in calls:
        if call.axis not in inside or call.nbytes < 0:
            axes = ", ".join(inside) or "none"
            yield f"{where}: {call.kind} over {call.axis!r} of {call.nbytes} bytes; axes are {axes}"


def _wrong_split(split: Split, trace: Trace) -> Iterator[str]:
    """Yields what is wrong with the cut into stages."""
    # segments, and where they are
    ends = [0, *[end for _, end in split.segments]]
    runs = list(itertools.pairwise(ends))
    if runs != [*split.segments] or ends[-1] != len(trace.visits) or sorted(set(ends)) != ends:
        yield f"split.segments: expected consecutive runs of the {len(trace.visits)} visits"
    stages = set(split.homes)
    if len(split.homes) != len(split.segments) or stages != set(range(len(stages))):
        yield "split.homes: expected a stage for each segment, numbered from 0 without gaps"
    # what travels
    for at, flow in enumerate(split.flows):
        if not 0 <= flow.source < flow.target < len(split.segments):
            yield f"split.flows[{at}]: expected an earlier and a later segment"
    if len({flow[:2] for flow in split.flows}) < len(split.flows):
        yield "split.flows: one is there twice"
    # who holds what
    units = range(len(trace.units))
    for at, (unit, holders) in enumerate(split.shared):
        if unit not in units or [*holders] != sorted(stages.intersection(holders)) or len(holders) < 2:
            yield f"split.shared[{at}]: expected a unit, and two or more stages in their order"
    for at, (unit, stage) in enumerate(split.unused):
        if unit not in units or stage not in stages:
            yield f"split.unused[{at}]: expected a unit, and a stage"
    if trace.stage is not None and trace.stage not in stages:
        yield f"stage: {trace.stage} of {len(stages)} stages"


# ---- Programs as JSON, and the hash that ranks compare.
#
# {"version": 1, "trace": ..., "stages": [[op, ...], ...]}    a list of ops for each stage
#
# docs/program-1.schema.json describes it (docs/program_schema.py makes it). A new field of a record has
# a default, so that what was written before it is read; what else changes is another version, and `checked` reads both.

VERSION = 1
"""The version of what is written and read."""

Stages = tuple[tuple[Op, ...], ...]
"""The ops of each stage."""

NAMES = {op.__name__.lower(): op for op in OPS}
"""Name -> kind of op."""


def fingerprint(trace: Trace, stages: Stages) -> str:
    alike = [trace.agreed, trace.stage, *map(_ops, stages)]
    return hashlib.sha256(json.dumps(alike).encode()).hexdigest()


def to_json(trace: Trace, stages: Stages) -> str:
    return json.dumps(as_data(trace, stages))


# ---- reading


def from_json(text: str) -> tuple[Trace, Stages]:
    """Reads what `to_json` wrote. Each value must have the type of its field, and numbers in the trace must name units,
    visits and stages that exist; `verify` checks the ops. Raises ValueError that says where the mistake is."""
    try:
        return checked(strict_json.loads(text))
    except (TypeError, ValueError) as error:  # TypeError: `text` is no text
        raise ValueError(f"not a program in JSON: {error}; expected the text that to_json returned, no path") from error


def checked(data: Any) -> tuple[Trace, Stages]:
    """Checks what JSON has already been read as, as `from_json` does its text."""
    expected = "expected an object of a version, a trace and a list of stages"
    if not isinstance(data, dict) or "trace" not in data:
        raise ValueError(expected)
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"version: expected {VERSION}, got {reprlib.repr(version)}; what another yafsdp_fn has written is read by "
            "that one, and a schedule builds it anew"
        )
    if data.keys() != {"version", "trace", "stages"} or not isinstance(data["stages"], list) or not data["stages"]:
        raise ValueError(expected)
    trace = typed_at("trace", Trace, data["trace"])
    check_trace(trace)
    return trace, tuple(_stage(f"stages[{number}]", ops) for number, ops in enumerate(data["stages"]))


def as_data(trace: Trace, stages: Stages) -> dict[str, Any]:
    """Returns the data that `checked` takes, for JSON."""
    return {"version": VERSION, "trace": trace._asdict(), "stages": [_ops(ops) for ops in stages]}


def _ops(ops: Sequence[Op]) -> list[list[Any]]:
    return [[type(op).__name__.lower(), *op] for op in ops]


def _stage(where: str, ops: Any) -> tuple[Op, ...]:
    if not isinstance(ops, list):
        raise ValueError(f"{where}: expected a list of ops, got {reprlib.repr(ops)}")
    return tuple([_op(f"{where}[{at}]", item) for at, item in enumerate(ops)])


def _op(where: str, item: Any) -> Op:
    if not (isinstance(item, list) and item and isinstance(item[0], str) and item[0] in NAMES):
        raise ValueError(f"{where}: expected a list that begins with an op's name, got {reprlib.repr(item)}")
    op: Op = typed_at(f"{where}, {item[0]}", NAMES[item[0]], item[1:])
    return op
