"""Statistics, refusals and the reading of traces: everything that needs no rank process."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from train.bench import report, trace
from train.bench.options import Bench
from train.bench.timing import Sample, order, slowest


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"peers": ()}, "there is no ratio without a peer"),
        ({"peers": ("ddp", "ddp")}, "each peer once"),
        ({"peers": ("plain",), "ranks": 2}, "the plain module has no ranks; use --ranks 1"),
        ({"warmup": 1}, "--warmup 1"),
        ({"steps": 1}, "--steps 1"),
    ],
)
def test_options_are_refused_with_the_reason(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Bench(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [["ours", "fsdp2"], ["ours", "fsdp2", "ddp"], ["ours", "a", "b", "c"]])
def test_turns_rotate(names: list[str]) -> None:
    rounds = [order(names, i) for i in range(2 * len(names))]
    assert all(sorted(turns) == sorted(names) for turns in rounds)
    assert all(set(column) == set(names) for column in zip(*rounds, strict=True)), "somebody never has some turn"
    follows = Counter(pair for turns in rounds for pair in pairwise(turns))
    for name in names:
        assert len({before for before, after in follows if after == name}) > 1 or len(names) == 2, f"{name}: {follows}"


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [{"a": [Sample(1.0, 0.5), Sample(4.0, 0.1)]}, {"a": [Sample(2.0, 0.4), Sample(3.0, 0.2)]}]
    assert slowest(ranks) == {"a": [Sample(2.0, 0.5), Sample(4.0, 0.2)]}


def test_spread() -> None:
    found = report.spread([float(i) for i in range(11)])
    assert found == pytest.approx({"median": 5.0, "p10": 1.0, "p90": 9.0})


def test_equal_losses_pass() -> None:
    report.check_losses({"ours": 5.0, "ddp": 5.0 * (1 + 0.9e-4)})


@pytest.mark.parametrize("other", [5.001, math.nan, math.inf])
def test_losses_that_differ_are_refused(other: float) -> None:
    with pytest.raises(report.LossesDiffer, match="did not do the same work, so their times are not reported") as error:
        report.check_losses({"ours": 5.0, "fsdp2": 5.0, "ddp": other})
    assert f"ddp {other:.7g}" in str(error.value)


def test_bytes_sent_per_rank() -> None:
    kinds = {"all_gather": 100, "reduce_scatter": 200, "all_reduce": 400, "send": 7}
    collectives = {kind: {"count": 1, "bytes": size} for kind, size in kinds.items()}
    assert report.sent_bytes(collectives, 4) == 75 + 150 + 600 + 7
    assert report.sent_bytes({}, 1) == 0


def event(name: str, ts: float, dims: list[object], kinds: list[str]) -> dict[str, object]:
    args = {"Input Dims": dims, "Input type": kinds}
    return {"ph": "X", "name": name, "ts": ts, "dur": 1.0, "tid": 1, "args": args}


def write(path: Path, events: list[dict[str, object]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_collectives_are_read_from_a_trace(tmp_path: Path) -> None:
    span = {"ph": "X", "name": "step", "ts": 10.0, "dur": 100.0, "tid": 1, "cat": "user_annotation"}
    gather = ([[8], [4], [], []], ["c10::BFloat16", "c10::BFloat16", "", "Scalar"])
    path = write(
        tmp_path / "trace.json",
        [
            span,
            event("c10d::_allgather_base_", 5.0, *gather),  # before the step
            event("c10d::_allgather_base_", 11.0, *gather),
            event("c10d::_allgather_base_", 12.5, *gather),
            event("c10d::_allgather_base_", 12.6, *gather) | {"dur": 0.5},  # the same one, from under a dispatch mode
            event("c10d::_reduce_scatter_base_", 13.0, [[4], [8]], ["float", "float"]),
            event("gloo:all_reduce", 14.0, [[8]], ["float"]),  # how gloo does it: not another collective
            event("c10d::allreduce_", 15.0, [[[3], [2, 2]], []], ["TensorList", ""]),
            event("c10d::barrier", 16.0, [[1]], ["float"]),
            event("c10d::recv_", 17.0, [[[6]]], ["TensorList"]),
            event("c10d::send", 18.0, [[[6]]], ["TensorList"]),
        ],
    )
    assert trace.collectives(path, inside="step") == {
        "all_gather": {"count": 2, "bytes": 32},
        "all_reduce": {"count": 1, "bytes": 28},
        "reduce_scatter": {"count": 1, "bytes": 32},
        "send": {"count": 1, "bytes": 24},
    }


def test_an_unknown_collective_is_refused(tmp_path: Path) -> None:
    span = {"ph": "X", "name": "step", "ts": 0.0, "dur": 9.0, "tid": 1}
    path = write(tmp_path / "trace.json", [span, event("c10d::new_thing_", 1.0, [[4]], ["float"])])
    with pytest.raises(RuntimeError, match=r"c10d::new_thing_, which train/bench/trace\.py does not know"):
        trace.collectives(path, inside="step")
