"""Statistics, refusals and the reading of traces: everything that needs no rank process."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from benchmarks import counting, names, report, steps
from benchmarks.contenders import all_reducing
from benchmarks.harness import Sample, order, slowest
from benchmarks.options import Bench
from train import schedule_names


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"peers": ()}, "--schedules zero3 without --peers: expected two contenders"),
        ({"peers": ("ddp", "ddp")}, "--peers ddp ddp: each one once"),
        ({"schedules": ()}, "expected at least one of ddp, zero1"),
        ({"schedules": ("zero2", "zero2")}, "--schedules zero2 zero2: each one once"),
        ({"schedules": ("zero3", "zero4")}, "no builder 'zero4'; there are ddp, zero1"),
        ({"schedules": ("ddp-defer",)}, "ddp-defer: ddp does not take -defer here; it takes each of -remat, -update"),
        ({"schedules": ("zero3-resident",)}, "does not take -resident here; it takes each of -residentK"),
        ({"schedules": ("zero3-update2",)}, "does not take -update2"),
        ({"schedules": ("zero3-update-update",)}, "each of .* once"),
        ({"schedules": ("hsdp",), "ranks": 3}, "--schedules hsdp with --ranks 3: hsdp makes two copies"),
        (
            {"schedules": ("hpz",), "ranks": 1, "peers": ("plain",)},
            "--schedules hpz with --ranks 1: hpz makes two nodes",
        ),
        ({"microbatches": 2, "config": "B"}, "--microbatches 2 with --config B: a rank's batch of 1"),
        ({"microbatches": 4, "batch": 6}, "--microbatches 4 with --config A: a rank's batch of 6 .*; --batch sets it"),
        ({"batch": -1}, "--batch -1 --layers 0: expected a number, or 0"),
        ({"schedules": ("zero3-chunk",)}, "zero3 does not take -chunk here; it takes each of .*, -chunkN, "),
        ({"schedules": ("zero3-chunk1",)}, "--schedules zero3-chunk1: expected two or more chunks"),
        ({"schedules": ("zero3-chunk2-remat",)}, "zero3-chunk2-remat: .* a third time"),
        ({"schedules": ("zero3-chunk3",)}, "zero3-chunk3: a rank's 2 sequence.s. do not divide into 3 chunks"),
        (
            {"schedules": ("zero3", "zero3-chunk2"), "microbatches": 4, "batch": 4},
            "--schedules zero3-chunk2 with --microbatches 4: -chunk4 does as many in layer-major order",
        ),
        ({"peers": ("plain",), "ranks": 2}, "the plain module has no ranks; use --ranks 1"),
        ({"peers": ("fsdp3",)}, "--peers fsdp3: there is no peer 'fsdp3'; did you mean fsdp2"),
        ({"peers": ("ddp-remat",)}, "--peers ddp-remat: ddp does not take -remat; it takes each of -compile, -tuned"),
        ({"peers": ("ddp-tuned-tuned",)}, "takes each of -compile, -tuned once"),
        ({"peers": ("plain-compile",), "ranks": 2}, "--peers plain-compile with --ranks 2"),
        ({"schedules": ("zero3-unroll",)}, "zero3 does not take -unroll here; .*, -unrollK, -compile, -nolinear,"),
        ({"schedules": ("zero3-nofused2",)}, "does not take -nofused2"),
        ({"schedules": ("zero3-compile-compile",)}, "does not take -compile here; it takes each of"),
        ({"schedules": ("zero3-unroll1",)}, "zero3-unroll1: expected two or more layers per visit"),
        ({"schedules": ("zero3-unroll9",)}, "zero3-unroll9: there are 8 layers to unroll"),
        ({"schedules": ("zero3-unroll8",), "layers": 4}, "zero3-unroll8: there are 4 layers to unroll"),
        ({"warmup": 1}, "--warmup 1"),
        ({"steps": 1}, "--steps 1"),
    ],
)
def test_options_are_refused_with_the_reason(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Bench(**options)


@pytest.mark.parametrize("names", [["ours", "fsdp2"], ["ours", "fsdp2", "ddp"], ["ours", "a", "b", "c"]])
def test_turns_rotate(names: list[str]) -> None:
    rounds = [order(names, i) for i in range(2 * len(names))]
    assert all(sorted(turns) == sorted(names) for turns in rounds)
    assert all(set(column) == set(names) for column in zip(*rounds, strict=True)), "somebody never has some turn"
    follows = Counter(pair for turns in rounds for pair in pairwise(turns))
    for name in names:
        assert len({before for before, after in follows if after == name}) > 1 or len(names) == 2, f"{name}: {follows}"


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [
        {"a": [Sample(1.0, 0.5, 0.4), Sample(4.0, 0.1, 0.1)]},
        {"a": [Sample(2.0, 0.4, 0.3), Sample(3.0, 0.2, 0.1)]},
    ]
    assert slowest(ranks) == {"a": [Sample(2.0, 0.5, 0.4), Sample(4.0, 0.2, 0.1)]}


def test_spread() -> None:
    found = report.spread([float(i) for i in range(11)])
    assert found == pytest.approx({"median": 5.0, "p10": 1.0, "p90": 9.0})


def test_ratios_are_of_steps_of_one_round() -> None:
    assert report.ratios([1.0, 4.0, 9.0], [2.0, 2.0, 3.0]) == pytest.approx({"median": 2.0, "p10": 0.8, "p90": 2.8})


def test_equal_losses_pass() -> None:
    report.check_losses({"ours": 5.0, "ddp": 5.0 * (1 + 0.9e-4)})


@pytest.mark.parametrize("other", [5.001, math.nan, math.inf])
def test_losses_that_differ_are_refused(other: float) -> None:
    with pytest.raises(report.LossesDiffer, match="did not do the same work, so their times are not reported") as error:
        report.check_losses({"ours": 5.0, "fsdp2": 5.0, "ddp": other})
    assert f"ddp {other:.7g}" in str(error.value)


def test_names_of_contenders() -> None:
    found = names.read("zero3-unroll8-resident2-compile-nolinear-update")
    assert (found.base, found.unroll, found.features) == ("zero3-resident2-update", 8, {"compile", "nolinear"})
    peer = names.read("torch-fsdp2-compile-tuned")
    assert (peer.base, peer.ours, peer.tuned, peer.features) == ("fsdp2", False, True, {"compile", "tuned"})


@pytest.mark.parametrize(
    ("options", "peer", "goal"),
    [
        ({}, "torch-fsdp2", 0.80),
        ({}, "torch-fsdp2-tuned", 0.88),
        ({"config": "C"}, "torch-ddp", 1.10),
        ({"config": "B", "ranks": 1, "peers": ("plain",)}, "torch-plain", 0.92),
        ({"config": "B", "ranks": 4}, "torch-ddp", None),
        ({"batch": 4}, "torch-fsdp2", None),
        ({"layers": 16}, "torch-fsdp2", None),
        ({"batch": 2}, "torch-fsdp2", 0.80),  # the config's own
        ({"config": "tiny"}, "torch-fsdp2", None),
    ],
)
def test_goals_are_those_of_the_runs_they_were_set_for(options: dict[str, Any], peer: str, goal: float | None) -> None:
    assert steps.goal(steps.TIME_GOALS, Bench(**options), peer) == goal


def test_a_missed_goal_is_said() -> None:
    assert [report.reached(x, 0.8) for x in (0.79, 0.8004, 0.801)] == ["0.80 reached", "0.80 reached", "0.80 MISSED"]
    assert report.reached(0.5, None) == ""


def test_names_of_schedules() -> None:
    parsed = schedule_names.parse("zero3-resident2-update-remat-prefetch3")
    assert parsed == ("zero3", {"resident": 2, "update": True, "remat": ya.schedules.remat.all, "prefetch": 3})
    assert schedule_names.mesh("ddp", 4) == {"replicate": 4, "shard": 1}
    assert schedule_names.mesh("zero3-defer", 4) == {}
    assert schedule_names.parse("zero3-update-chunk4") == ("zero3", {"update": True, "chunk": 4})
    assert [schedule_names.split(name, 4) for name in ("zero3", "zero3-chunk4")] == [(4, 1), (1, 4)]
    assert schedule_names.mesh("hpz", 8) == {"local": 4}
    assert all_reducing("hsdp-update", 8) == 2
    assert all_reducing("ddp", 8) == all_reducing("torch-ddp", 8) == 8


@pytest.mark.parametrize(
    ("kind", "sizes", "sent"),
    [
        ("all_gather", [100, 25], 75),
        ("all_gather", [100, 50], 50),  # in a group of two: its arguments say so
        ("reduce_scatter", [50, 200], 150),
        ("all_reduce", [400], 600),
        ("all_to_all", [400, 400], 300),
        ("send", [70], 70),
        ("all_reduce", [32], 0),  # scalars
    ],
)
def test_bytes_sent_per_rank(kind: str, sizes: list[int], sent: int) -> None:
    assert counting.sent_bytes(kind, sizes, 4) == sent


def test_bytes_that_are_not_those_of_the_program_are_said() -> None:
    def ours(sent: int) -> dict[str, object]:
        return {"sent_bytes": sent, "program": {"wire_bytes": {"gather": 70, "reduce": 30}}}

    (sentence,) = steps.unlike_program({"zero3": ours(100), "zero2": ours(99), "torch-ddp": {"sent_bytes": 5}})
    assert sentence == "zero2: a rank sent 99 bytes in a step, its program says 100"


@pytest.mark.nightly
def test_contenders_that_do_not_fit_together_are_refused() -> None:
    bench = Bench(config="B", ranks=4, schedules=("zero3", "zero1", "ddp"))
    needs = {name: steps.held_bytes(bench, name) for name in bench.contenders}
    assert needs["zero3"] == needs["torch-fsdp2"] < needs["zero1"] < needs["ddp"] == needs["torch-ddp"]
    needed = sum(needs.values()) + 4 * steps.process_bytes(bench)
    assert steps.too_much(bench, needed) is None
    assert steps.too_much(bench, None) is None
    refusal = steps.too_much(bench, needed - 1)
    more = [steps.held_bytes(bench, name) for name in ("zero3-compile", "zero3-unroll2", "zero3-unroll8-resident2")]
    assert needs["zero3"] == more[0] < more[1] < more[2], "wider slots"
    beside = dataclasses.replace(bench, peers=("ddp-tuned",))
    rest = sum(steps.held_bytes(beside, name) for name in beside.contenders)
    assert steps.too_much(beside, rest + 8 * steps.process_bytes(beside)) is None, "two sets of processes"
    assert steps.too_much(beside, rest + 8 * steps.process_bytes(beside) - 1) is not None
    assert steps.too_much(dataclasses.replace(bench, batch=2), needed) is not None, "the activations of more rows"
    parts = [steps.process_bytes(dataclasses.replace(bench, batch=2, microbatches=n)) for n in (1, 2)]
    assert parts[0] > parts[1], "of one microbatch at a time"
    assert refusal is not None
    assert "several commands that begin with the same --schedules zero3" in refusal


def event(name: str, ts: float, dims: list[object], kinds: list[str]) -> dict[str, object]:
    args = {"Input Dims": dims, "Input type": kinds}
    return {"ph": "X", "name": name, "ts": ts, "dur": 1.0, "tid": 1, "args": args}


def write(path: Path, events: list[dict[str, object]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_collectives_are_read_from_a_trace(tmp_path: Path) -> None:
    span = {"ph": "X", "name": "step", "ts": 10.0, "dur": 100.0, "tid": 1, "cat": "user_annotation"}
    gather = ([[80], [40], [], []], ["c10::BFloat16", "c10::BFloat16", "", "Scalar"])
    path = write(
        tmp_path / "trace.json",
        [
            span,
            event("c10d::_allgather_base_", 5.0, *gather),  # before the step
            event("c10d::_allgather_base_", 11.0, *gather),
            event("c10d::_allgather_base_", 12.5, *gather),
            event("c10d::_allgather_base_", 12.6, *gather) | {"dur": 0.5},  # the same one, from under a dispatch mode
            event("c10d::_reduce_scatter_base_", 13.0, [[40], [80]], ["float", "float"]),
            event("gloo:all_reduce", 14.0, [[8]], ["float"]),  # how gloo does it: not another collective
            event("c10d::allreduce_", 15.0, [[[30], [20, 2]], []], ["TensorList", ""]),
            event("c10d::barrier", 16.0, [[1]], ["float"]),
            event("c10d::recv_", 17.0, [[[60]]], ["TensorList"]),
            event("c10d::send", 18.0, [[[60]]], ["TensorList"]),
        ],
    )
    assert counting.collectives(path, inside="step", group=2) == {
        "all_gather": {"count": 2, "bytes": 320, "sent": 160},
        "all_reduce": {"count": 1, "bytes": 280, "sent": 280},
        "reduce_scatter": {"count": 1, "bytes": 320, "sent": 160},
        "send": {"count": 1, "bytes": 240, "sent": 240},
    }


def test_an_unknown_collective_is_refused(tmp_path: Path) -> None:
    span = {"ph": "X", "name": "step", "ts": 0.0, "dur": 9.0, "tid": 1}
    path = write(tmp_path / "trace.json", [span, event("c10d::new_thing_", 1.0, [[4]], ["float"])])
    with pytest.raises(RuntimeError, match=r"c10d::new_thing_, which benchmarks/counting\.py lacks"):
        counting.collectives(path, inside="step", group=2)
