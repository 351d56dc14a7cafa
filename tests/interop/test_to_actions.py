"""Programs as rows of torch's actions: they come back from `from_actions`, and say what they leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tests.interop.test_actions import FAMILIES, rows_of, trace_for
from tests.program.traces import cut, model, on
from tests.schedules.cases import EVERY
from yafsdp_fn.interop.actions import MESSAGES, REDUCTION, WEIGHTS, read_rows, written
from yafsdp_fn.schedules import (
    Call,
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
INSIDE = [zero1(), zero2(), zero3(), zero3(resident=2, remat="all"), zero3(defer=True, prefetch=3)]


def traced(places: tuple[int, ...], microbatches: int = 3, **options: Any) -> Trace:
    return cut(model(2 * len(places) - 2, microbatches, **options), places)


def loaded(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


@pytest.mark.parametrize(("order", "places"), ORDERS)
def test_rows_come_back(order: Any, places: tuple[int, ...], tmp_path: Path) -> None:
    """As the same program, from the CSV."""
    for number, sharding in enumerate(INSIDE):
        if not EVERY and number != len(places) - 2:
            continue
        trace = traced(places, tied=bool(number % 2))
        program = order(sharding)(trace)
        to_actions(program).save(tmp_path / "rows.csv")
        assert verify(from_actions(tmp_path / "rows.csv", sharding)(trace)) == program


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "GPipe"])
def test_torchs_calls_come_back(family: str) -> None:
    """From rows as torch has lowered them, with gathers, messages and reductions."""
    for stages in (2, 3, 4) if EVERY else (3,):
        given = rows_of(family, stages, 2 * stages, True)
        rows = to_actions(from_actions(loaded(given))(trace_for(family, stages, 2 * stages))).rows
        for mine, theirs in zip(rows, read_rows(given), strict=True):
            assert list(mine) == [written(action.call) for action in theirs if action.call is not None]


def test_torch_loads_the_rows(tmp_path: Path) -> None:
    """Its parser and its checks, without ranks; what it adds are messages, gathers and reductions."""
    actions = to_actions(v_shaped()(traced((0, 1, 1, 0))))
    actions.save(tmp_path / "rows.csv")
    runtime: Any = object.__new__(_PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches, runtime._stages = 2, 4, 3, []
    runtime._defer_pp_recv, runtime.pipeline_order = False, {}
    runtime._load_csv(tmp_path / "rows.csv", "compute_only")
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    words = {action.word for row in read_rows(loaded(runtime.pipeline_order_with_comms.values())) for action in row}
    assert {*MESSAGES, *WEIGHTS, REDUCTION} <= words


def text(program: Program) -> str:
    return str(to_actions(program))


def test_the_whole_text() -> None:
    assert text(one_f_one_b(zero2(remat="all"))(traced((0, 1), 2))).splitlines() == [
        "rank 0: 0F0 0F1 0B0 0B1",
        "rank 1: 1F0 1B0 1F1 1B1",
        "not in the rows: recomputation of 2 visits: checkpoint those layers inside of the module",
        "not in the rows: when messages, gathers and reductions are issued: torch adds its own to rows of computes",
    ]


def test_what_rows_cannot_say_is_named() -> None:
    update = on(model(6, 3, tied=True), "ranks", "after norm")
    assert "not in the rows: updates of the optimizer" in text(one_f_one_b(zero1(update=True))(cut(update, (0, 1))))
    assert "sums of the gradients of units that stages share" in text(gpipe(zero1())(cut(update, (0, 1))))
    nodes = cut(on(model(6, 3), "nodes"), (0, 1))
    assert "gathers inside of a node" in text(one_f_one_b(hpz(2))(nodes))


def test_microbatches_are_numbered_as_torch_takes_their_losses() -> None:
    rows = [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1F0", "1B0", "1B1"]]
    actions = to_actions(from_actions(rows)(traced((0, 1), 2)))
    assert actions.rows == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B1", "1B0"))
    assert actions.left_out[0] == "numbers of microbatches: here they are in the order of losses, [1, 0]"


def test_what_torch_cannot_run() -> None:
    with pytest.raises(ValueError, match="the step has none"):
        to_actions(zero3()(model(4)))
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
