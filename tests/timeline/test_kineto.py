"""Recordings of torch.profiler of steps of FSDP2, as timelines of the program that it ran: a real one, and kernels."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

import yafsdp_fn as ya
from tests.harness import damage, forked
from tests.harness.marks import nightly
from tests.harness.pool import Pool
from tests.program.traces import model
from tests.steps.test_fsdp2 import SAME, VOCAB, Model, loss_of
from yafsdp_fn.lab import peers
from yafsdp_fn.program.ops import Backward, Forward, Gather, Reduce
from yafsdp_fn.schedules import fsdp2

PARTS = 2
TOKENS = torch.arange(8).view(4, 2) % VOCAB


def record(_: Any, folder: str, names: list[str]) -> None:
    """Records the second and the third step of each way to apply FSDP2, on rank 0."""
    for name in names:
        module = Model()
        SAME[name][0](module, init_device_mesh("cpu", (2,)))

        def done(profiler: Any, name: str = name) -> None:
            if torch.distributed.get_rank() == 0:
                profiler.export_chrome_trace(f"{folder}/{name}.json")

        steps = schedule(wait=0, warmup=1, active=2)
        with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=done) as profiler:
            for _ in range(3):
                for rows in TOKENS.chunk(PARTS):
                    loss_of(module(rows), rows).backward()
                profiler.step()


def traced() -> ya.schedules.Trace:
    params, run = ya.functionalize(Model(), "layers")
    return ya.planner.trace(
        lambda p, b: loss_of(run(p, b), b), params, TOKENS, ranks=2, microbatches=PARTS, tx=ya.optim.adamw(1e-3)
    )


def test_a_step_of_fsdp2_on_two_ranks(pools: dict[int, Pool], tmp_path: Path) -> None:
    """Every op has its time, in the order of the program, and is compared with a prediction."""
    names = ["layers", "every", "held"]
    pools[2].run(record, str(tmp_path), names)
    trace = traced()
    for name in names:
        settings = SAME[name][1]
        programs = [fsdp2(**settings)(trace), peers.fsdp2(**settings)(trace)]
        for program in programs:
            for step in (None, 1, 2):
                found = ya.timeline.read_kineto(tmp_path / f"{name}.json", program, step=step)
                ops = {n for n, op in enumerate(program.ops) if isinstance(op, Gather | Forward | Backward | Reduce)}
                assert {span.number for span in found.spans} == ops
                ends = 0.0
                for span in found.spans:  # the host does one after the other
                    assert ends <= span.start < span.end <= found.seconds
                    ends = span.end
        predicted = ya.planner.simulate(programs[1], "local")
        compared = ya.planner.compare({"predicted": predicted, "measured": found})
        assert len(compared.late("predicted", "measured")) == len(ops)
        assert "predicted over measured" in str(compared)
        predicted.save(tmp_path / "both.svg", beside=found)
    assert found.measured and found.title == "measured by torch.profiler: held.json"
    (tmp_path / "held.json.gz").write_bytes(gzip.compress((tmp_path / "held.json").read_bytes()))
    assert ya.timeline.read_kineto(tmp_path / "held.json.gz", program, step=2).spans == found.spans
    with pytest.raises(
        ValueError, match=r"FSDP::all_gather \(layers.0\): 4 in the recording, 2 in the program: expected"
    ):
        ya.timeline.read_kineto(tmp_path / "layers.json", fsdp2(reshard_after_forward=False)(trace))
    with pytest.raises(ValueError, match=r"modules gathered: 6 in the recording, 5 in the program"):
        ya.timeline.read_kineto(tmp_path / "every.json", fsdp2()(trace))
    with pytest.raises(ValueError, match=r"there is no ProfilerStep#7, but \[1, 2\]"):
        ya.timeline.read_kineto(tmp_path / "every.json", fsdp2(wrap="all")(trace), step=7)


# ---- kernels: made by hand, from the names and fields that torch.profiler writes on GPUs

GATHER, REDUCE = (
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)",
)
GEMM, COPY = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "void split_with_sizes_copy_out_contiguous_no_cast",
)

STEP: list[tuple[str, float, float, list[tuple[str, int, float, float]]]] = [
    # what the host does, from, for, and what it launches there: name, stream, from, for
    ("FSDP::root_pre_forward", 1, 1, []),
    ("FSDP::pre_forward (embed)", 3, 7, [(COPY, 7, 45, 2)]),
    ("FSDP::all_gather (embed)", 4, 4, [(COPY, 19, 11, 1), (GATHER, 20, 12, 30)]),
    ("", 11, 3, [("indexSelect", 7, 50, 5), ("elementwise", 7, 56, 4)]),
    ("FSDP::post_forward (embed)", 15, 2, []),
    ("FSDP::pre_forward (a.0)", 18, 6, [(COPY, 7, 80, 2)]),
    ("FSDP::all_gather (a.0)", 19, 3, [(GATHER, 20, 44, 33)]),
    ("", 25, 4, [(GEMM, 7, 83, 20)]),
    ("FSDP::post_forward (a.0)", 30, 2, []),
    ("FSDP::pre_forward (head)", 33, 6, []),
    ("FSDP::all_gather (head)", 34, 3, [(GATHER, 20, 83, 10)]),
    ("", 40, 3, [(GEMM, 7, 105, 30)]),
    ("FSDP::post_forward (head)", 44, 1, []),
    ("", 46, 2, [("nll_loss", 7, 136, 4)]),
    ("FSDP::pre_backward (head)", 49, 6, []),
    ("FSDP::backward_prefetch for a.0", 50, 4, []),
    ("FSDP::all_gather (a.0)", 51, 3, [(GATHER, 20, 110, 30)]),
    ("", 56, 3, [(GEMM, 7, 142, 60)]),
    ("FSDP::post_backward_accumulate (head)", 60, 1, []),
    ("FSDP::post_backward_reduce (head)", 62, 3, [("chunk_cat", 7, 203, 2), (REDUCE, 24, 206, 40)]),
    ("FSDP::pre_backward (a.0)", 66, 5, []),
    ("FSDP::backward_prefetch for embed", 67, 3, []),
    ("FSDP::all_gather (embed)", 68, 2, [(GATHER, 20, 150, 30)]),
    ("", 72, 3, [(GEMM, 7, 206, 21), (GEMM, 7, 228, 22)]),
    ("FSDP::post_backward_reduce (a.0)", 76, 3, [(REDUCE, 24, 252, 41)]),
    ("FSDP::pre_backward (embed)", 80, 2, []),
    ("", 83, 2, [("embedding_backward", 7, 255, 9)]),
    ("FSDP::root_post_backward_callback", 86, 8, []),
    ("FSDP::post_backward_reduce (embed)", 88, 4, [(REDUCE, 24, 295, 12)]),
]  # fmt: skip


def kineto(step: list[Any] = STEP, **more: Any) -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 9, "tid": 9, "ts": 1000, "dur": 100},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#3", "pid": 0, "tid": 7, "ts": 1010, "dur": 300},
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
    ]
    for name, ts, dur, kernels in step:
        thread = 9 if "backward" not in name else 11  # autograd has a thread of its own
        if name:
            events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": name,
                    "pid": 9,
                    "tid": thread,
                    "ts": 1000 + ts,
                    "dur": dur,
                }
            )
        for number, (kernel, stream, start, length) in enumerate(kernels):
            of = len(events)
            launched = 1000 + ts + 0.1 + number / 10
            args = {"correlation": of}
            launch = {"name": "cudaLaunchKernel", "pid": 9, "tid": thread, "ts": launched, "dur": 0.05, "args": args}
            events.append({"ph": "X", "cat": "cuda_runtime", **launch})
            ran = {"name": kernel, "pid": 0, "tid": stream, "ts": 1000 + start, "dur": length}
            events.append({"ph": "X", "cat": "kernel", **ran, "args": {"stream": stream, **args}})
    return {"schemaVersion": 1, "traceEvents": events, **more}


def test_kernels_by_where_they_were_launched(tmp_path: Path) -> None:
    """Collectives by their names, computes without copies of gathers; on the streams of the program."""
    (tmp_path / "gpu.json").write_text(json.dumps(kineto()))
    program = fsdp2(wrap="all")(model(1))
    found = ya.timeline.read_kineto(tmp_path / "gpu.json", program, step=3)
    assert [(span.stream, (round(1e6 * span.start, 6), round(1e6 * span.end, 6))) for span in found.spans] == [
        *[("gather", (12, 42)), ("compute", (50, 60)), ("gather", (44, 77)), ("compute", (83, 103))],
        *[("gather", (83, 93)), ("compute", (105, 135)), ("gather", (110, 140)), ("compute", (142, 202))],
        *[("reduce", (206, 246)), ("gather", (150, 180)), ("compute", (206, 250)), ("reduce", (252, 293))],
        *[("compute", (255, 264)), ("reduce", (295, 307))],
    ]
    assert found.seconds == pytest.approx(307e-6) and found.busy("gather") == pytest.approx(133e-6)
    assert str(found).startswith("measured by torch.profiler: gpu.json: 307 µs")


def test_an_op_without_kernels_has_no_span(tmp_path: Path) -> None:
    step = [(name, ts, dur, kernels if (name, ts) != ("", 11) else []) for name, ts, dur, kernels in STEP]
    (tmp_path / "gpu.json").write_text(json.dumps(kineto(step)["traceEvents"]))  # a list alone is a trace, too
    found = ya.timeline.read_kineto(tmp_path / "gpu.json", fsdp2(wrap="all")(model(1)))
    assert len(found.spans) == 13


def test_what_is_no_recording(tmp_path: Path) -> None:
    program, path = fsdp2(wrap="all")(model(1)), tmp_path / "x.json"
    events = '{"traceEvents": [{"ph": "X", "name": "", "ts": 0, "args": 3}]}'
    for text in ("", "3", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}', events):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x.json: expected a recording of torch.profiler in JSON"):
            ya.timeline.read_kineto(path, program)
    whole = gzip.compress(json.dumps(kineto()).encode())
    for damaged in (whole[: len(whole) // 2], whole[:12] + bytes(8) + whole[20:]):
        (tmp_path / "x.json.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x.json.gz: expected a recording"):
            ya.timeline.read_kineto(tmp_path / "x.json.gz", program)
    with pytest.raises(ValueError, match=r"none.json: expected a recording"):
        ya.timeline.read_kineto(tmp_path / "none.json", program)
    path.write_text(json.dumps({"traceEvents": kineto()["traceEvents"][:3]}))
    with pytest.raises(ValueError, match=r"no range of FSDP2, such as FSDP::all_gather, is in it in ProfilerStep#3"):
        ya.timeline.read_kineto(path, program)
    less = [each for each in STEP if each[0] != "FSDP::post_backward_reduce (a.0)"]
    path.write_text(json.dumps(kineto(less)))
    with pytest.raises(ValueError, match=r"FSDP::post_backward_reduce \(a.0\): 0 in the recording, 1 in the program"):
        ya.timeline.read_kineto(path, program)
    staged: Any = ya.schedules.Program(program.trace, program.ops, program.ops)
    with pytest.raises(ValueError, match="expected the program of one stage"):
        ya.timeline.read_kineto(path, staged)


# ---- recordings of other people


def event(number: int, **changes: Any) -> dict[str, Any]:
    """The recording with another value in one of its events."""
    data = kineto()
    data["traceEvents"][number] |= changes
    return data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (event(4, dur=-1), r"traceEvents\[4\].dur: expected 0 to .*, got -1"),
        (event(4, dur=1e999), r"traceEvents\[4\].dur: expected a finite number, got inf"),
        (event(4, ts=10**400), r"traceEvents\[4\].ts: expected a finite number"),
        (event(4, ts="1"), r"traceEvents\[4\].ts: expected a finite number, got '1'"),
        (event(5, args={"correlation": [1]}), r"traceEvents\[5\].correlation: expected an int of 64 bits, got \[1\]"),
        (event(5, args=[]) | {"traceEvents": {}}, r"traceEvents: expected a list of events"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, data: Any, says: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"x.json: expected a recording of torch.profiler in JSON: {says}"):
        ya.timeline.read_kineto(tmp_path / "x.json", fsdp2(wrap="all")(model(1)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"traceEvents": [' + b"9" * 10_000 + b"]}", "limit"),
        (gzip.compress(b"[" + b"{}," * 2**23), "unpacks to 16,777,216 bytes or more"),
        (gzip.compress(b"[]") * 2, "goes on behind its end"),
    ],
    ids=["nested", "digits", "packed", "twice"],
)
def test_a_file_that_would_fill_the_memory(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / ("x.json.gz" if text[:2] == b"\x1f\x8b" else "x.json")
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"{path.name}: expected a recording .*{says}"):
        ya.timeline.read_kineto(path, fsdp2(wrap="all")(model(1)))


def spoilt(rng: random.Random) -> bytes:
    """A recording with some of the fields of some events damaged, or its text; packed at times, at times a bomb."""
    data = kineto()
    if rng.random() < 0.6:
        for _ in range(rng.choice((1, 1, 2, 20))):
            each = rng.choice(data["traceEvents"])
            each[rng.choice(["name", "cat", "ph", "ts", "dur", "args", "pid"])] = copy.deepcopy(rng.choice(damage.ODD))
        text = json.dumps(data).replace(f'"{damage.DEEP}"', "[" * 3000 + "]" * 3000).encode()
    else:
        text = damage.json_damage(data, rng)
    if rng.random() < 0.3:
        text = gzip.compress(text + b" " * rng.choice((0, 0, 10**6, 10**8)))
        text = damage.byte_damage(text, rng) if rng.random() < 0.3 else text
    return text


def searched(folder: str, count: int, answer: Callable[[Any], None]) -> None:
    """For a process of its own: memory and what is opened are looked at."""
    path = [Path(folder, "trace.json")]
    program = fsdp2(wrap="all")(model(1))

    def make(rng: random.Random) -> int:
        text = spoilt(rng)
        path[0] = Path(folder, "trace.json.gz" if text[:2] == b"\x1f\x8b" else "trace.json")
        path[0].write_bytes(text)
        return damage.ROOM // 4  # the limit is that of the address space: a file may unpack to FLOOR bytes

    def load() -> None:
        try:
            found = ya.timeline.read_kineto(path[0], program)
        except ValueError as error:
            assert "trace.json" in str(error), error
            raise
        assert all(0 <= span.start <= span.end <= found.seconds for span in found.spans)

    answer(damage.search("kineto", range(count), make, load, Path(folder), (ValueError,)))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [30, nightly(1000)])
def test_damaged_recordings(tmp_path: Path, count: int) -> None:
    queue: Any = forked.context().SimpleQueue()
    process = forked.context().Process(target=searched, args=(str(tmp_path), count, queue.put))
    process.start()
    process.join()
    assert process.exitcode == 0
    found: Counter[str] = queue.get()
    print(f"kineto: {count} recordings: {dict(found)}")
    assert found.total() == count and 0 < found["loaded"] < count
