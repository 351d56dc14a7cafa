"""Programs as rows of torch's actions: they come back from `from_actions`, and say what they leave out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

from tests.interop.test_actions import FAMILIES, MESSAGES, listed, rows_of, trace_for
from tests.program.traces import cut, model, on
from tests.schedules.cases import EVERY
from yafsdp_fn.schedules import (
    Call,
    Gather,
    Program,
    Refused,
    Trace,
    from_actions,
    gpipe,
    hpz,
    interleaved,
    one_f_one_b,
    staged,
    to_actions,
    v_shaped,
    verify,
    zero1,
    zero2,
    zero3,
    zero_bubble,
)

ORDERS: list[tuple[Any, tuple[int, ...]]] = [
    (gpipe, (0, 1)),
    (one_f_one_b, (0, 1, 2)),
    (zero_bubble, (0, 1, 2)),
    (interleaved, (0, 1, 0, 1)),
    (v_shaped, (0, 1, 1, 0)),
]
WAITS = hasattr(_ComputationType, "WAIT_SEND_F")
"""Whether this torch has them: from 2.15 on."""
INSIDE = [zero1(), zero2(), zero3(), zero3(resident=2, remat="all"), zero3(defer=True, prefetch=3)]


def traced(places: tuple[int, ...], microbatches: int = 3, **options: Any) -> Trace:
    return cut(model(2 * len(places) - 2, microbatches, **options), places)


def loaded(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


@pytest.mark.parametrize(("order", "places"), ORDERS)
def test_rows_come_back(order: Any, places: tuple[int, ...], tmp_path: Path) -> None:
    """Rows of computes as the same program, with all else as the same rows; and from the CSV."""
    for number, sharding in enumerate(INSIDE):
        if not EVERY and number != len(places) - 2:
            continue
        trace = traced(places, tied=bool(number % 2))
        program = order(sharding)(trace)
        assert verify(from_actions(to_actions(program).rows, sharding)(trace)) == program
        whole = to_actions(program, "compute_comms")
        whole.save(tmp_path / "rows.csv")
        again = verify(from_actions(tmp_path / "rows.csv", sharding)(trace))
        assert to_actions(again, "compute_comms").rows == whole.rows


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "GPipe"])
def test_torchs_rows_come_back(family: str) -> None:
    """Calls, gathers and reductions as torch has lowered them, and messages, each in their order; torch, too, would
    let go of weights where these do."""
    for stages in (2, 3, 4) if EVERY else (3,):
        rows = loaded(rows_of(family, stages, 2 * stages, True))
        rows = [[part for each in row for part in re.sub(r"[()]|OVERLAP_F_B", "", each).split(";")] for row in rows]
        program = from_actions(rows)(trace_for(family, stages, 2 * stages))
        found = to_actions(program, "compute_comms", waits=WAITS).rows
        for mine, theirs in zip(found, rows, strict=True):
            for messages in (True, False):
                one, other = (
                    [each for each in row if ("_F" in each or "_B" in each) == messages] for row in (mine, theirs)
                )
                assert one == other


def test_torch_loads_the_rows(tmp_path: Path) -> None:
    """Its parser and its checks, without ranks."""
    for of in ("compute_only", "compute_comms"):
        whole = of == "compute_comms"
        actions = to_actions(v_shaped()(traced((0, 1, 1, 0))), of, waits=WAITS and whole)
        actions.save(tmp_path / "rows.csv")
        runtime: Any = object.__new__(_PipelineScheduleRuntime)
        runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches, runtime._stages = 2, 4, 3, []
        runtime._defer_pp_recv = False
        runtime.pipeline_order = {}
        runtime._max_active_stages, runtime._unshard_lookahead = 3, "full"
        runtime._defer_reduce_grad_wait, runtime._max_outstanding_sends = False, None
        runtime._load_csv(tmp_path / "rows.csv", of)
        assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
        if whole:
            assert loaded(runtime.pipeline_order_with_comms.values()) == [list(row) for row in actions.rows]


def text(program: Program) -> str:
    return str(to_actions(program, "compute_comms"))


def test_the_whole_text() -> None:
    assert text(one_f_one_b(zero2(remat="all"))(traced((0, 1), 2))).splitlines() == [
        "rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        "rank 1: 1UNSHARD 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD",
        "not in the rows: recomputation of 2 visits: checkpoint those layers inside of the module",
        "not in the rows: slots, of weights 2, 2 on the stages: torch allocates what it gathers",
        "not in the rows: reductions in each microbatch on stage 0, up to 2 of a unit: REDUCE_GRAD is there once",
        "not in the rows: reductions in each microbatch on stage 1, up to 2 of a unit: REDUCE_GRAD is there once",
    ]


def test_rows_with_waits() -> None:
    """An activation has come when its gradient does, a gradient at the end of the row; and no program has waits."""
    trace = traced((0, 1), 2)
    program = one_f_one_b(zero2())(trace)
    found = to_actions(program, "compute_comms", waits=True)
    assert str(found).splitlines()[:2] == [
        "rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 0WAIT_SEND_F1 "
        "0REDUCE_GRAD 0WAIT_REDUCE_GRAD 0RESHARD",
        "rank 1: 1UNSHARD 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 "
        "1REDUCE_GRAD 1WAIT_REDUCE_GRAD 1RESHARD 1WAIT_SEND_B0 1WAIT_SEND_B1",
    ]
    assert from_actions(found.rows)(trace) == from_actions(to_actions(program, "compute_comms").rows)(trace)
    with pytest.raises(ValueError, match="rows of computes have none"):
        to_actions(program, waits=True)


def test_what_rows_cannot_say_is_named() -> None:
    update = on(model(6, 3, tied=True), "ranks", "after norm")
    assert "not in the rows: updates of the optimizer" in text(one_f_one_b(zero1(update=True))(cut(update, (0, 1))))
    assert "sums of the gradients of units that stages share" in text(gpipe(zero1())(cut(update, (0, 1))))
    nodes = cut(on(model(6, 3), "nodes"), (0, 1))
    assert "gathers inside of a node" in text(one_f_one_b(hpz(2))(nodes))
    layers = cut(model(6, 2), (0, 1))
    assert "unit by unit" not in text(one_f_one_b(zero2())(layers))
    streamed = one_f_one_b(zero3())(layers)
    gathers = streamed.by_stage[0].count(Gather)
    assert gathers > 4
    what = f"gathers unit by unit on stage 0, {gathers} in all: UNSHARD is of a whole segment, which comes to 4 units"
    assert what in text(streamed)


def test_microbatches_are_numbered_as_torch_takes_their_losses() -> None:
    rows = [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1F0", "1B0", "1B1"]]
    actions = to_actions(from_actions(rows)(traced((0, 1), 2)))
    assert actions.rows == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B1", "1B0"))
    assert actions.left_out[0] == "numbers of microbatches: here they are in the order of losses, [1, 0]"


def test_messages_that_would_wait_for_each_other_in_one_communicator() -> None:
    """Both ranks send first: ours has a communicator for each way."""
    rows = listed(*MESSAGES)
    program = verify(from_actions(rows)(traced((0, 1), 2)))
    assert "as on NCCL, ranks would wait for ever: rank 0 at 0SEND_F1, rank 1 at 1SEND_B0" in text(program)
    assert "wait for ever" not in text(one_f_one_b()(traced((0, 1), 2)))


def test_what_torch_cannot_run() -> None:
    with pytest.raises(ValueError, match="the step has none"):
        to_actions(zero3()(model(4)))
    with pytest.raises(ValueError, match="expected 'compute_only' or 'compute_comms'"):
        to_actions(one_f_one_b()(traced((0, 1))), "csv")
    with pytest.raises(ValueError, match="forwards alone"):
        to_actions(one_f_one_b()(traced((0, 1), backward=False)))
    skips = cut(model(6, 1), (0, 1, 2), ((0, 2),))
    with pytest.raises(ValueError, match="segment 2 takes something of segment 0; torch's runtime sends from each"):
        to_actions(one_f_one_b()(skips))
    right = one_f_one_b()(traced((0, 1)))
    with pytest.raises(Refused):
        to_actions(right.with_ops(right.stages[0][:-1]))
    trace = traced((0, 1), 1)
    with pytest.raises(Refused, match="no forward of segment 1"):
        staged(lambda *_: [[Call("forward", 0, 0), Call("backward", 0, 0)], []])(trace)
