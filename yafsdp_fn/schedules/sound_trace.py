"""A trace that came as text: its numbers name what is there, and its figures can be.

`verify` proves ops against a trace, and takes the trace's word for what the step is.
"""

import math
from collections.abc import Iterator

from yafsdp_fn.schedules.split import Split
from yafsdp_fn.schedules.trace import Trace

MOST_RANKS, MOST_PARTS, MOST_EMPTY = 2**17, 2**10, 2**10
"""Some of what is asked of a trace counts up to these. MOST_EMPTY: microbatches in which nothing is visited"""


def check_trace(trace: Trace) -> None:
    """Raises ValueError with the first thing that is wrong, and its place."""
    for why in _wrong(trace):
        raise ValueError(f"trace.{why}")


def _wrong(trace: Trace) -> Iterator[str]:
    units, visits = set(range(len(trace.units))), range(len(trace.visits))
    for at, unit in enumerate(trace.units):
        if unit.id != at:
            yield f"units[{at}].id: expected {at}, its place, got {unit.id}"
        sizes = {
            field: getattr(unit, field) for field in ("layer", "numel", "gather_bytes", "reduce_bytes", "sum_bytes")
        }
        for field, size in sizes.items():
            if size < 0:
                yield f"units[{at}].{field}: expected a number of at least 0, got {size}"
    for at, visit in enumerate(trace.visits):
        if visit.id != at:
            yield f"visits[{at}].id: expected {at}, its place, got {visit.id}"
        if not set(visit.units) <= units or len(set(visit.units)) < len(visit.units):
            yield f"visits[{at}].units: expected different ones of the {len(units)} units"
        if not set(visit.trained) <= set(visit.units) or len(set(visit.trained)) < len(visit.trained):
            yield f"visits[{at}].trained: expected different ones of its units"
        for number in visit.trained:
            if not trace.units[number].trainable:
                yield f"visits[{at}].trained: units[{number}] is not trainable"
    computes = [compute[:3] for compute in trace.order]
    if not 1 <= trace.microbatches <= max(len(computes), MOST_EMPTY):
        yield f"microbatches: {trace.microbatches} of {len(computes)} computes"
    if len(set(computes)) < len(computes):
        yield "order: one of its computes is there twice"
    for at, (kind, number, microbatch, closes) in enumerate(trace.order):
        if number not in visits or not 0 <= microbatch < trace.microbatches:
            yield f"order[{at}]: {kind} of visit {number} in microbatch {microbatch}: there is no such"
        if not set(closes) <= units:
            yield f"order[{at}].closes: expected some of the {len(units)} units"
    if trace.split is not None:
        yield from _wrong_split(trace.split, trace)
    elif trace.stage is not None:
        yield f"stage: {trace.stage} of a step that is not split"
    if len(dict(trace.mesh)) < len(trace.mesh) or any(size < 1 for _, size in trace.mesh):
        yield "mesh: expected axes of different names, with one rank or more each"
    if math.prod(size for _, size in trace.mesh) > MOST_RANKS:
        yield f"mesh: at most {MOST_RANKS} ranks"
    if trace.optimizer.step[1] < 1:
        yield "optimizer.step: it must be measured on one element or more"
    if len({of.unit for of in trace.lent}) < len(trace.lent):
        yield "lent: one unit is there twice"
    for at, of in enumerate(trace.lent):
        if of.unit not in units:
            yield f"lent[{at}].unit: there are units 0 to {len(units) - 1}, got {of.unit}"
        if not 1 <= of.parts <= MOST_PARTS:
            yield f"lent[{at}].parts: expected 1 to {MOST_PARTS}, got {of.parts}"
        if any(min(offset, nbytes, flops, *shape) < 0 for offset, shape, nbytes, flops in of.leaves):
            yield f"lent[{at}].leaves: expected numbers of at least 0"


def _wrong_split(split: Split, trace: Trace) -> Iterator[str]:
    ends = [0, *[end for _, end in split.segments]]
    if (
        [first for first, _ in split.segments] != ends[:-1]
        or ends[-1] != len(trace.visits)
        or sorted(set(ends)) != ends
    ):
        yield f"split.segments: expected consecutive runs of the {len(trace.visits)} visits"
    stages = set(split.homes)
    if len(split.homes) != len(split.segments) or stages != set(range(len(stages))):
        yield "split.homes: expected a stage for each segment, numbered from 0 without gaps"
    for at, (source, target, nbytes, grad_bytes) in enumerate(split.flows):
        if not 0 <= source < target < len(split.segments) or min(nbytes, grad_bytes) < 0:
            yield f"split.flows[{at}]: expected an earlier and a later segment, and bytes of at least 0"
    if len({flow[:2] for flow in split.flows}) < len(split.flows):
        yield "split.flows: one is there twice"
    units = set(range(len(trace.units)))
    for at, (unit, holders) in enumerate(split.shared):
        if unit not in units or not set(holders) <= stages or list(holders) != sorted(set(holders)) or len(holders) < 2:
            yield f"split.shared[{at}]: expected a unit, and two or more stages in their order"
    if trace.stage is not None and trace.stage not in stages:
        yield f"stage: {trace.stage} of {len(stages)} stages"
