"""Rows of actions: those of every family of torch, what they say of weights and reductions, and errors."""

from __future__ import annotations

import csv
import inspect
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from tests.program.traces import cut, model, on
from tests.proof.overlapped import right
from tests.schedules.cases import EVERY
from yafsdp_fn.interop.actions import read_rows, written
from yafsdp_fn.pipelines import orders
from yafsdp_fn.schedules import (
    AllReduce,
    Gather,
    Program,
    Receive,
    Reduce,
    Refused,
    Send,
    Trace,
    from_actions,
    one_f_one_b,
    staged,
    verify,
    zero1,
    zero2,
    zero3,
)

FAMILIES = {
    **dict.fromkeys(("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"), ("loop", 2)),
    **dict.fromkeys(("ZBVZeroBubble", "DualPipeV"), ("v", 2)),
    "GPipe": ("loop", 1),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)


def rows_of(family: str, stages: int, microbatches: int, comms: bool = False, **options: Any) -> Any:
    per_stage = FAMILIES.get(family, ("", 1))[1]
    number = per_stage if per_stage > 1 else None
    return get_schedule_ops(family, stages, microbatches, number, with_comms=comms, **options)


def trace_for(family: str, stages: int, microbatches: int, mesh: str = "ranks") -> Trace:
    shape, per_stage = FAMILIES.get(family, ("loop", 1))
    places = (*range(stages), *reversed(range(stages))) if shape == "v" else tuple(range(stages)) * per_stage
    return cut(on(model(2 * len(places) - 2, microbatches), mesh), places)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_torch_is_proved(family: str) -> None:
    """With and without torch's own messages, gathers and reductions."""
    found: Counter[bool] = Counter()
    for stages in range(2, 9) if EVERY else (2, 3, 4, 8 if family == "ZBVZeroBubble" else 5):
        for microbatches in (stages, 2 * stages, 3 * stages) if EVERY else (2 * stages,):
            for comms in (False, True)[
                : 1 + (family != "GPipe")
            ]:  # torch lowers those of several stages per rank alone
                try:
                    rows = rows_of(family, stages, microbatches, comms)
                except ValueError as error:
                    assert "requires at least as many microbatches" in str(error)
                    assert family == "DualPipeV"
                    continue
                trace = trace_for(family, stages, microbatches)
                pipeline = verify(from_actions(rows)(trace))
                found[comms] += 1
                if stages == 3:
                    assert right(pipeline)
                    verify(from_actions(rows, zero3(remat="all", defer=True))(trace))
    print(f"\n{family}: {found[False]} without messages, {found[True]} with, all proved")
    assert found[False] >= 4


def test_the_1f1b_of_torch_2_13_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        from_actions(rows_of("1F1B", 4, 8))(trace_for("1F1B", 4, 8))
    assert refused.value.rule == "calls"
    assert refused.value.stage == 3
    lines = str(refused.value).splitlines()
    assert lines == [
        "rule 'calls': row 3, column 1 (3B0): no forward of segment 3, microbatch 0 before it",
        "    row 3, column 14 (3F8): there are microbatches 0 to 7",
        "    row 3: no forward of segment 3, microbatch 0",
    ]


def test_receives_that_torch_defers_come_in_another_order_than_they_are_sent() -> None:
    """Of `defer_pp_recv`: where values and gradients go the same way, between two stages of a V."""
    if "defer_pp_recv" not in inspect.signature(get_schedule_ops).parameters:
        pytest.skip("this torch has no defer_pp_recv")
    rows = rows_of("ZBVZeroBubble", 4, 8, True, defer_pp_recv=True)
    with pytest.raises(Refused, match=r"rule 'match': message \d+ from stage \d to \d is another one there"):
        verify(from_actions(rows)(trace_for("ZBVZeroBubble", 4, 8)))


def test_csv_and_torchs_own_dict(tmp_path: Path) -> None:
    rows = rows_of("Interleaved1F1B", 2, 4, True)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    trace = trace_for("Interleaved1F1B", 2, 4)
    same = from_actions(rows)(trace)
    assert from_actions(tmp_path / "rows.csv")(trace) == same == from_actions(str(tmp_path / "rows.csv"))(trace)
    assert from_actions({1: rows[1], 0: rows[0]})(trace) == same
    assert from_actions([[str(action) for action in row] for row in rows])(trace) == same
    with pytest.raises(ValueError, match=r"from_actions: there is no file .*missing\.csv"):
        from_actions(tmp_path / "missing.csv")
    with pytest.raises(ValueError, match=r"from_actions: there is no file '0F0 .*rows themselves are lists"):
        from_actions("0F0 " * 2000)  # longer than any file's name


def test_our_own_orders_come_back() -> None:
    trace = cut(model(6, 5), (0, 1, 2))
    assert trace.split is not None
    rows = orders.one_f_one_b_calls(trace.split, 5)
    again = from_actions([[written(call) for call in row] for row in rows], zero1())(trace)
    assert again == one_f_one_b(zero1())(trace)


# ---- what rows say is taken as they say it


def listed(*rows: str) -> list[list[str]]:
    return [row.split() for row in rows]


PLAIN = listed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
TRACE = cut(model(4, 2), (0, 1))


def of(program: Program, kind: type[Any]) -> list[Any]:
    return [op for op in program.ops if isinstance(op, kind)]


def test_weights_and_reductions_as_listed() -> None:
    rows = listed(
        "0UNSHARD 0F0 0F1 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD 0RESHARD",
        "1UNSHARD 1F0 1B0 1F1 1B1 1RESHARD 1REDUCE_GRAD",
    )
    pipeline = verify(from_actions(rows)(TRACE))
    assert right(pipeline)
    units = [sum(unit.numel > 0 for unit in program.trace.units) for program in pipeline.by_stage]
    assert [program.count(Gather) for program in pipeline.by_stage] == [2 * units[0], units[1]]
    assert [program.count(Reduce) for program in pipeline.by_stage] == [2 * units[0], units[1]]
    replicas = cut(on(model(4, 2), "replicas", "after norm"), (0, 1))
    assert right(verify(from_actions(rows, zero2(remat="all", update=True))(replicas)))
    alone = from_actions(listed("0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"), zero3())(TRACE)
    assert [program.count(Reduce) for program in verify(alone).by_stage] == units


def test_segments_that_are_never_there_together_share_slots() -> None:
    rows = listed(
        "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD",
        "1UNSHARD 3UNSHARD 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    )
    trace = cut(model(6, 2), (0, 1, 0, 1))
    even = trace._replace(
        units=tuple(unit._replace(numel=10, gather_bytes=40, reduce_bytes=80) for unit in trace.units)
    )
    first, second = verify(from_actions(rows)(even)).by_stage
    assert (len(first.slot_bytes()), len(second.slot_bytes())) == (2, 4)


def test_a_unit_of_two_segments_is_there_as_long_as_one_of_them_wants_it() -> None:
    rows = listed(
        "0UNSHARD 0F0 0F1 3UNSHARD 0RESHARD 3F0 3F1 3B0 3B1 0UNSHARD 3RESHARD 0B0 0B1 0REDUCE_GRAD 3REDUCE_GRAD",
        "1UNSHARD 2UNSHARD 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 2REDUCE_GRAD 1REDUCE_GRAD",
    )
    pipeline = verify(from_actions(rows)(cut(model(6, 2, tied=True), (0, 1, 1, 0))))
    assert right(pipeline)
    assert sum(op.units.count(0) for op in of(pipeline.by_stage[0], Gather)) == 1
    assert sum(op.units.count(0) for op in of(pipeline.by_stage[0], Reduce)) == 1


def test_a_unit_of_two_stages_is_summed_over_them_once() -> None:
    trace = cut(model(4, 2, tied=True), (0, 1))
    for rows in (PLAIN, listed(*WEIGHTS), listed(*REDUCED)):
        pipeline = verify(from_actions(rows)(trace))
        assert right(pipeline)
        sums = [op for program in pipeline.by_stage for op in of(program, AllReduce)]
        assert sums == [AllReduce((0,), "stages")] * 2


def test_messages_as_listed() -> None:
    rows = listed(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0",
    )
    pipeline = verify(from_actions(rows)(TRACE))
    assert right(pipeline)
    assert [op.microbatch for op in of(pipeline.by_stage[0], Receive)] == [1, 0]
    assert [type(op) for op in pipeline.stages[1][:2]] == [Receive, Receive]
    assert len(of(pipeline.by_stage[0], Send)) == 2


def test_both_at_once_and_an_evaluation() -> None:
    rows = listed("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    assert from_actions([["0F0", None, "(0F1;0B0)OVERLAP_F_B", "", " 0B1 "], rows[1]])(TRACE) == from_actions(PLAIN)(
        TRACE
    )
    forward = cut(model(4, 3, backward=False), (0, 1))
    assert from_actions(rows)(forward) == staged(orders.forward_only)(forward)


# ---- errors


@pytest.mark.parametrize(
    "word", ["F0", "0F", "0X1", "0UNSHARD1", "0f0", "-1F0", "0F0 1F0", "(0F0;0B0", "(0F0;zz)OVERLAP_F_B", "0SEND_F"]
)
def test_what_is_no_action(word: str) -> None:
    with pytest.raises(ValueError, match=r"row 1, column 2: '.*': expected an action, such as 2F0"):
        from_actions([["0F0"], ["1F0", "", word]])


@pytest.mark.parametrize("given", [[], "nothing", None, ["0F0"], [["0F0"], "1F0"], 3])
def test_what_are_no_rows(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="from_actions: "):
        read_rows(given)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (PLAIN[:1], r"1 rows of actions for 2 stages; build the state on ya.mesh\(stage=1\)"),
        (PLAIN[::-1], r"the rows have segments on stages 1 0, the state has them on 0 1; give it that assignment"),
    ],
)
def test_rows_of_another_shape(rows: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_actions(rows)(TRACE)


MESSAGES = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
]
V = [
    "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
    "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
]
WEIGHTS = ["0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD", "1UNSHARD 1F0 1B0 1F1 1B1 1RESHARD"]
REDUCED = ["0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"]


@pytest.mark.parametrize(
    ("rows", "old", "new", "rule", "message"),
    [
        (MESSAGES, " 0SEND_F1", "", "flow", r"row 0, column 2 \(0F1\): .*what it gives is never sent; no 0SEND_F1"),
        (
            MESSAGES,
            "1RECV_F1 ",
            "",
            "flow",
            r"row 1, column 4 \(1F1\): .*what it takes has not come: no 1RECV_F1 before",
        ),
        (
            MESSAGES,
            "0SEND_F0",
            "0SEND_F1",
            "flow",
            r"row 0, column 1 \(0SEND_F1\): .*nothing to send: no 0F1 before it",
        ),
        (MESSAGES, "1RECV_F0", "1RECV_F0 1RECV_F0", "flow", r"row 1, column 1 \(1RECV_F0\): .*received already"),
        (MESSAGES, "1F0", "1F0 1RECV_F0", "flow", r"row 1, column 2 \(1RECV_F0\): .*nothing takes what is received"),
        (MESSAGES, "1RECV_F0", "1RECV_F0 0RECV_B0", "calls", r"row 1, column 1 \(0RECV_B0\): .*not on stage 1"),
        (
            WEIGHTS,
            "0F1 0B0",
            "0F1 0RESHARD 0B0",
            "weights",
            r"row 0, column 4 \(0B0\): .*weights of segment 0 are not the",
        ),
        (WEIGHTS, "0F1 0B0", "0F1 0UNSHARD 0B0", "weights", r"row 0, column 3 \(0UNSHARD\): .*is there already"),
        (WEIGHTS, "1UNSHARD ", "", "weights", r"row 1, column 0 \(1F0\): .*no 1UNSHARD before it"),
        (REDUCED, " 0REDUCE_GRAD", "", "once", r"row 0, column 3 \(0B1\): .*never reduced; no 0REDUCE_GRAD after it"),
        (REDUCED, "1F0", "1REDUCE_GRAD 1F0", "reduce", r"row 1, column 0 \(1REDUCE_GRAD\): .*no gradient of segment 1"),
        (REDUCED, "1F0", "0REDUCE_GRAD 1F0", "reduce", r"row 1, column 0 \(0REDUCE_GRAD\): .*no gradient of segment 0"),
        (
            V,
            "1F0 2F0",
            "2F0 1F0",
            "flow",
            r"row 1, column 1 \(2F0\): .*what it takes is made by a later call of its row",
        ),
        (REDUCED, "0B0", "0B0 0B0", "calls", r"row 0, column 3 \(0B0\): it is there twice"),
        (REDUCED, "0B0", "0B0 7F0", "calls", r"row 0, column 3 \(7F0\): there are segments 0 to 1"),
        (REDUCED, "1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1", "", ""),
    ],
)
def test_rows_that_are_refused(rows: list[str], old: str, new: str, rule: str, message: str) -> None:
    changed = [row.replace(old, new) for row in rows]
    assert changed != rows
    if not rule:
        verify(from_actions(listed(*changed))(TRACE))
        return
    trace = TRACE if rows is not V else cut(model(6), (0, 1, 1, 0))
    verify(from_actions(listed(*rows))(trace))
    with pytest.raises(Refused) as refused:
        from_actions(listed(*changed))(trace)
    assert refused.value.rule == rule and re.search(message, str(refused.value)), refused.value


def test_messages_of_a_step_with_a_skip_connection() -> None:
    trace = cut(model(6, 1), (0, 1, 2), ((0, 2),))
    rows = listed(
        "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0", "2RECV_F0 2F0 2B0 2SEND_B0"
    )
    with pytest.raises(ValueError, match=r"segment 2 takes something of segment 0 .* leave SEND and RECV out"):
        from_actions(rows)(trace)
    without = [[action for action in row if "_" not in action] for row in rows]
    assert right(verify(from_actions(without)(trace)))


def test_many_wrong_actions_are_counted() -> None:
    with pytest.raises(Refused, match=r"\n    \.\.\. and \d+ more$"):
        from_actions([[], []])(cut(model(4, 9), (0, 1)))
