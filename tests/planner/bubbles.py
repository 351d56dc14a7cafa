"""Bubbles of published pipeline schedules, for the times that their paper measured.

    rows()           the table of the zero-bubble paper: seconds of F, B, W and messages, and its bubble rates
    published(row)   the rates of our programs: 1F1B, interleaved, ZB-H1, ZB-H2, and, for ZB-1p and ZB-2p, of
                     orders that search finds within the memory of p and of 2 p microbatches

A rate is the part of the longest stage, from its first call to its last, in which its calls do not run. Memory is
counted as there: a forward adds an activation, the backward of inputs leaves of it what that of weights needs.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

from tests.planner.pipelines import NO_LINKS, chain
from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner import Cluster, simulate
from yafsdp_fn.planner.orders import CallGraph, Search, evaluate
from yafsdp_fn.program.split import Call, CallRows, Flow, Split
from yafsdp_fn.schedules import Program, Trace, staged, verify, zero1

TABLE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "published_bubbles.csv"


class Row(NamedTuple):
    """A setting of the paper. Milliseconds of a stage's calls in a microbatch, and the bubbles that it gives."""

    model: str
    stages: int
    microbatches: int
    T_F_ms: float
    T_B_ms: float
    T_W_ms: float
    T_comm_ms: float
    bubble_1F1B: float
    bubble_1F1B_I: float
    bubble_ZB_H1: float
    bubble_ZB_H2: float
    bubble_ZB_1p: float
    bubble_ZB_2p: float
    source: str


class Model(NamedTuple):
    """A model of the paper. segments: of each stage, where it is interleaved: a layer each, with one for the embedding
    and one for the head; between: the part of an activation that the backward of inputs leaves."""

    segments: int
    between: float


def _model(layers: int, heads: int, width: int, stages: int) -> Model:
    # bytes per token and feature: 32 of 34 + 5 heads positions / width, of 1024 positions
    return Model((layers + 2) // stages, 32 / (34 + 5 * heads * 1024 / width))


MODELS = {
    "1.5B": _model(22, 24, 2304, 8),
    "6.2B": _model(30, 32, 4096, 8),
    "14.6B": _model(46, 40, 5120, 16),
    "28.3B": _model(62, 48, 6144, 32),
}
SEARCHED = 10
"""Lists for an order of the paper's table."""


def rows() -> list[Row]:
    with TABLE.open(newline="") as file:
        kinds = get_type_hints(Row)
        return [Row(**{name: kinds[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


# ---- A row's calls, the orders of them, and programs of these.


def split_of(stages: int, per_stage: int = 1, *, v: bool = False) -> Split:
    """Segments of a visit each, in a loop over the stages or forth and back."""
    homes = (*range(stages), *reversed(range(stages))) if v else (*range(stages),) * per_stage
    flows = tuple(Flow(k, k + 1, 8, 8) for k in range(len(homes) - 1))
    return Split(tuple((k, k + 1) for k in range(len(homes))), homes, flows)


def calls_of(row: Row, split: Split) -> CallGraph:
    """A row's calls on the segments of `split`, which share a stage evenly; memory in activations of a stage."""
    count = len(split.homes)
    parts = len(split.homes) // split.stages
    forward, inputs, weights = ((seconds / parts / 1e3,) * count for seconds in (row.T_F_ms, row.T_B_ms, row.T_W_ms))
    held = (1 / parts,) * count
    between = (MODELS[row.model].between / parts,) * count
    return CallGraph(split.homes, row.microbatches, forward, inputs, weights, row.T_comm_ms / 1e3, held, between)


zero_bubble_2 = functools.partial(orders.zero_bubble_calls, depth=2)
"""ZB-H2."""


def trace_of(calls: CallGraph, split: Split) -> tuple[Trace, Cluster]:
    """A step whose calls take as long as `calls` on the cluster beside it, where all else takes no time."""
    flops = NO_LINKS.matmul_flops
    visits = []
    chained = chain(len(split.homes), calls.microbatches)
    for visit, forward, inputs, weights in zip(chained.visits, calls.forward, calls.inputs, calls.weights, strict=True):
        products = min(forward, inputs)  # the rest of either is attention, which has no weights
        cost = visit.cost._replace(
            flops=round(flops * products),
            bwd_flops=round(flops * (products + weights)),
            attention_flops=round(flops * (forward - products)),
            bwd_attention_flops=round(flops * (inputs - products)),
        )
        visits.append(visit._replace(cost=cost))
    mesh = (("stage", split.stages), ("shard", 1))
    trace = chained._replace(visits=tuple(visits), mesh=mesh, split=split)
    return trace, NO_LINKS.replace(network_latency=calls.message)


def simulated(calls: CallGraph, split: Split, order: Sequence[Sequence[Call]]) -> tuple[Program, float]:
    """The program of an order, proved, and its bubble in simulation."""
    trace, cluster = trace_of(calls, split)
    program = verify(staged(lambda *_: [[*row] for row in order], zero1(), pace=calls.pace)(trace))
    computes = [stage.on("compute") for stage in simulate(program, cluster).by_stage]
    longest = max(spans[-1].end - spans[0].start for spans in computes)
    return program, 1 - busiest(calls) / longest


# ---- Bubbles of orders.


def busiest(calls: CallGraph) -> float:
    """Seconds in which the calls of the stage that has most of them run."""
    seconds = [0.0] * calls.stages
    for home, *parts in zip(calls.homes, calls.forward, calls.inputs, calls.weights, strict=True):
        seconds[home] += sum(parts)
    return calls.microbatches * max(seconds)


class ShortestSpan(Search):
    """Looks for the order whose longest span, from the first call of a row to its last, is shortest."""

    def length(self, begin: float, end: float) -> float:
        return end - begin


class Unawaited(CallGraph):
    """Calls of which some begin without the message from another segment."""

    some: frozenset[Call]

    def source(self, call: Call) -> int | None:
        return None if call in self.some else super().source(call)


def bubble(calls: CallGraph, rows: CallRows, unawaited: Sequence[Call] = ()) -> float:
    """The bubble of an order. unawaited: calls that begin without the message from another segment"""
    given = Unawaited(*calls)
    given.some = frozenset(unawaited)
    run = evaluate(given, rows)
    return 1 - busiest(calls) / max(end - begin for begin, end in zip(run.begins, run.ends, strict=True))


# ---- The paper's table.


def published(row: Row) -> dict[str, tuple[float, float]]:
    """Schedule -> the paper's bubble, and that of our order.

    1F1B_I: every call awaits its message; 1F1B_I*: as the paper counts, whose messages from the first stage back to the
    last one, between two segments of a stage, are awaited by the first microbatch of each P alone
    """
    p = row.stages
    m = row.microbatches
    loop = split_of(p)
    several = split_of(p, MODELS[row.model].segments)
    calls = calls_of(row, loop)
    of_several = calls_of(row, several)
    interleaved = orders.interleaved_calls(several, m)
    last = [s for s, home in enumerate(several.homes) if home == p - 1 and s + 1 < len(several.homes)]
    others = [Call("backward", s, number) for s in last for number in range(m) if number % p]
    h1 = orders.zero_bubble_calls(loop, m)
    h2 = zero_bubble_2(loop, m)
    found = {
        "1F1B": bubble(calls, orders.one_f_one_b_calls(loop, m)),
        "1F1B_I": bubble(of_several, interleaved),
        "1F1B_I*": bubble(of_several, interleaved, others),
        "ZB_H1": bubble(calls, h1),
        "ZB_H2": bubble(calls, h2),
    }
    for name, memory in (("ZB_1p", p), ("ZB_2p", 2 * p)):
        search = ShortestSpan(calls, memory, starts=[h1, h2])
        search.run(SEARCHED)
        found[name] = bubble(calls, search.rows)
    return {name: (getattr(row, f"bubble_{name.rstrip('*')}"), bubble) for name, bubble in found.items()}
