"""Every small change of a right pipeline is refused, or leaves it right: nothing wrong is accepted.

Changes of rows of actions, with gathers, reductions and messages among them: each action left out, each two neighbours
exchanged. Changes of programs: ops of one stage dropped, doubled, moved, swapped, added or edited. Random ones of steps
with what is seldom there (`step_of`), 10,000 of them. The judge is `overlapped.right`, which runs all stages
and knows no rules. By default a sample; SCHEDULE_MUTANTS=all tries every one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.harness.marks import by_day
from tests.interop.test_actions import FAMILIES, rows_of, trace_for
from tests.pipelines.orders import ORDERS, homes
from tests.program.traces import cut, model, on
from tests.proof.changed import a_pipeline
from tests.proof.mutants import mutants
from tests.proof.overlapped import right
from tests.schedules.cases import EVERY
from yafsdp_fn.interop.actions import written
from yafsdp_fn.pipelines.orders import FACTORIES, one_f_one_b_calls
from yafsdp_fn.proof.stages import calls_of
from yafsdp_fn.schedules import Program, Refused, Schedule, Trace, from_actions, verify, zero1, zero2, zero3

Rows = list[list[str]]
MICROBATCHES = dict.fromkeys(FAMILIES, 4) | {"DualPipeV": 8}
pytestmark = [pytest.mark.timeout(3600)] * EVERY


def changed(rows: Rows) -> Iterator[Rows]:
    """`rows` without each of their actions, and with each two neighbours exchanged."""
    for number, row in enumerate(rows):
        for at in range(len(row)):
            yield [*rows[:number], [*row[:at], *row[at + 1 :]], *rows[number + 1 :]]
            if at + 1 < len(row) and row[at] != row[at + 1]:
                yield [*rows[:number], [*row[:at], row[at + 1], row[at], *row[at + 2 :]], *rows[number + 1 :]]


def judged(make: Callable[[], Program], verdicts: Counter[str], seed: int) -> None:
    """Counts the verdict on a pipeline, which must not be accepted if it is wrong."""
    try:
        pipeline = verify(make())
    except Refused as refused:
        assert f"rule {refused.rule!r}" in str(refused)
        verdicts[refused.rule] += 1
        return
    assert right(pipeline, seed), f"accepted, though wrong:\n{pipeline}"
    verdicts["accepted, right"] += 1


def made(rows: Rows, trace: Trace, sharding: Schedule | None = None) -> Program:
    return from_actions(rows, sharding)(trace)


def shown(what: str, verdicts: Counter[str]) -> None:
    print(f"\n{what}: {sum(verdicts.values())} changes; " + ", ".join(f"{k} {n}" for k, n in sorted(verdicts.items())))


def torchs(family: str) -> Rows:
    """Of four stages, with everything that torch adds."""
    return [
        [str(action) for action in row if action is not None] for row in rows_of(family, 4, MICROBATCHES[family], True)
    ]


def own() -> Rows:
    """1F1B, with the messages, gathers and reductions that torch would have added."""
    trace = cut(model(6, 5), (0, 1, 2, 3))
    assert trace.split is not None
    rows: Rows = []
    for s, calls in enumerate(one_f_one_b_calls(trace.split, 5)):
        row = [f"{s}UNSHARD"]
        for call in calls:
            forward = call.kind == "forward"
            if s > 0 and forward:
                row.append(f"{s}RECV_F{call.microbatch}")
            if s < 3 and not forward:
                row.append(f"{s}RECV_B{call.microbatch}")
            row.append(written(call))
            if s < 3 and forward:
                row.append(f"{s}SEND_F{call.microbatch}")
            if s > 0 and not forward:
                row.append(f"{s}SEND_B{call.microbatch}")
        rows.append([*row, f"{s}REDUCE_GRAD", f"{s}RESHARD"])
    return rows


@pytest.mark.parametrize(
    "family", by_day(["1F1B", *(family for family in FAMILIES if family != "GPipe")], "1F1B", "ZBVZeroBubble")
)
def test_no_wrong_row_of_actions_is_accepted(family: str) -> None:
    rows = own() if family == "1F1B" else torchs(family)
    trace = cut(model(6, 5), (0, 1, 2, 3)) if family == "1F1B" else trace_for(family, 4, MICROBATCHES[family])
    verify(from_actions(rows)(trace))
    verdicts: Counter[str] = Counter()
    every = enumerate(changed(rows))
    for number, mutant in every if EVERY else itertools.islice(every, 0, None, 53 if family != "1F1B" else 7):
        judged(partial(made, mutant, trace), verdicts, number)
    shown(family, verdicts)
    assert verdicts["accepted, right"]
    assert verdicts["flow"]
    assert verdicts["weights"]


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", [zero1(), zero3()], ids=["zero1", "zero3"])
def test_no_wrong_row_of_calls_is_accepted(sharding: Schedule) -> None:
    """Without messages, gathers and reductions: those are ours, and fit whatever order can run."""
    verdicts: Counter[str] = Counter()
    for order in ORDERS:
        trace = cut(model(4 * 2, 4), homes(order, 4))
        pipeline = FACTORIES[order](sharding)(trace)
        rows = [[written(call) for call in calls] for calls in _rows(pipeline)]
        assert verify(from_actions(rows, sharding)(trace)) == pipeline
        every = enumerate(changed(rows))
        for number, mutant in every if EVERY else itertools.islice(every, 0, None, 41):
            judged(partial(made, mutant, trace, sharding), verdicts, number)
    shown("calls alone", verdicts)
    assert verdicts["accepted, right"]
    assert verdicts["calls"]
    assert not EVERY or verdicts["deadlock"]


def _rows(pipeline: Program) -> list[list[object]]:
    return [list(calls_of(program)) for program in pipeline.by_stage]


CASES = {
    "1f1b": ("one_f_one_b", zero1(), "ranks", "never", 2),
    "zero bubble": ("zero_bubble", zero3(), "ranks", "never", 2),
    "updated": ("one_f_one_b", zero2(update=True), "replicas", "after norm", 2),
    "v": ("v_shaped", zero3(remat="all"), "ranks", "never", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_no_wrong_neighbour_of_a_pipeline_is_accepted(case: str) -> None:
    order, sharding, mesh, updates, microbatches = CASES[case]
    trace = cut(on(model(2, microbatches), mesh, updates), homes(order, 2))
    start = FACTORIES[order](sharding)(trace)
    assert right(verify(start))
    verdicts: Counter[str] = Counter()
    number = 0
    for stage, program in enumerate(start.by_stage):
        for mutant in mutants(program):
            number += 1
            if not EVERY and number % 29:
                continue
            judged(partial(start.with_ops, mutant.ops, stage), verdicts, number)
    shown(case, verdicts)
    assert verdicts["accepted, right"]
    assert verdicts["flow"]
    assert verdicts["calls"]


SEEDS = 4


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_wrong_pipeline_of_an_odd_step_is_accepted(seed: int) -> None:
    """Of any order and sharding: their calls, messages and ops changed once or twice."""
    rng = random.Random(seed)
    verdicts = Counter[str]()
    while sum(verdicts.values()) < (10000 if EVERY else 60) // SEEDS:
        pipeline = a_pipeline(rng, 1)
        if pipeline is not None:
            judged(lambda made=pipeline: made, verdicts, rng.randrange(2**32))
    shown(f"odd steps, seed {seed}", verdicts)
    assert verdicts["accepted, right"]
    assert verdicts["flow"]
