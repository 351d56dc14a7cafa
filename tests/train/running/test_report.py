"""metrics.jsonl, the printed lines, the meter that reads metrics late."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import models
from models import llama
from train.data.rows import Place
from train.running.files import Events
from train.running.flops import peak, per_token
from train.running.meter import Meter
from train.running.report import Part, Record, Report, duration, fitted, sparkline


def record(step: int, loss: float = 2.0, mfu: float | None = None) -> Record:
    return Record(step, loss, 0.5, 1e-3, 1000.0, 20.0, 1 << 20, mfu)


def report(folder: Path | None, first: int = 0, *, terminal: bool = False) -> tuple[Report, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=110)
    return Report(folder, steps=20, first=first, log_every=10, console=console), shown


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_one_object_a_line_and_go_to_tensorboard(tmp_path: Path) -> None:
    out, shown = report(tmp_path)
    with out:
        out.evaluation(0, math.log(256))
        for step in range(1, 21):
            out.train(record(step, 3.0 / step))
        out.evaluation(20, 1.5)
    found = lines(tmp_path)
    assert found[0] == {"step": 0, "eval_loss": math.log(256)}
    assert found[3] == {
        "step": 3,
        "loss": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_s": 1000.0,
        "step_ms": 20.0,
        "mem_bytes": 1 << 20,
    }
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [
        (0, pytest.approx(math.log(256))),
        (20, 1.5),
    ]
    assert len(events.Scalars("train/loss")) == 20
    text = shown.getvalue()
    assert "step     0/20  held-out loss 5.5452 nats a byte (8.000 bits)" in text
    assert [line.split()[1] for line in text.splitlines() if "tok/s" in line] == ["1/20", "10/20", "20/20"]
    assert "\x1b" not in text
    assert "ETA 0:00" in text


def test_a_terminal_shows_one_live_line_drawn_twice_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """20 steps in 2 seconds: some four redraws, and the last one."""
    clock = [0.0]
    monkeypatch.setattr("train.running.report.time.monotonic", lambda: clock[0])
    out, shown = report(tmp_path, terminal=True)
    with out:
        for step in range(1, 21):
            clock[0] += 0.1
            out.train(record(step, mfu=0.25))
    drawn = [line for line in shown.getvalue().splitlines() if "loss 2.0000" in line]
    assert 4 <= shown.getvalue().count("loss 2.0000") <= 6
    assert all(part in drawn[-1] for part in ("step 20/20", "MFU 25.0%", "ETA"))


def test_what_does_not_fit_is_left_out() -> None:
    parts = [
        Part("step 3/9", 0),
        Part("━━━", 3, fancy=True),
        Part("loss 2.1", 1),
        Part("long " * 20, 9),
        Part("ETA 0:01", 2),
    ]
    assert fitted(parts, 200).plain == "  ".join(part.text for part in parts)
    assert fitted(parts, 40).plain == "step 3/9  ━━━  loss 2.1  ETA 0:01"
    assert fitted(parts, 20).plain == "step 3/9  loss 2.1"
    assert fitted(parts, 5).plain == "step 3/9"  # cut by the terminal's width


def test_a_terminal_of_ascii_gets_ascii(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, "ascii"), force_terminal=True, width=110)
    with Report(tmp_path, steps=20, first=0, log_every=10, console=console) as out:
        out.train(record(1))
    console.file.flush()
    assert "step 1/20  loss 2.0000  1,000 tok/s" in raw.getvalue().decode("ascii")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([9.0, 1.0, 2.0, 3.0], "▁█"),  # the later half
        ([0.0] * 8 + [float(k) for k in range(8)], "▁▂▃▄▅▆▇█"),
        ([3.0] * 400, "▁" * 20),
        ([0.0] * 4 + [math.nan, 1.0, math.inf, 2.0], "▁█"),
    ],
)
def test_a_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_events_are_written_down_and_no_disk_is_no_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="over"), report(tmp_path)[0] as out:
        out.warn("look")
        raise RuntimeError("it is\nover")
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each.get("text", each.get("error"))) for each in found] == [
        ("warning", "look"),
        ("end", "RuntimeError: it is"),
    ]
    Events(tmp_path / "nowhere" / "events.jsonl").add("start")
    Events(None).add("start")
    assert [path.name for path in tmp_path.iterdir() if path.name == "nowhere"] == []


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (65, "1:05"), (3600 + 125, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def meter(found: list[Record]) -> Meter:
    model = llama.CONFIGS["debug"]
    return Meter(
        found.append,
        lr=lambda count: count / 10,
        tokens=512,
        model=model,
        seq_len=128,
        place=Place(0, 1, torch.device("cpu")),
    )


def metrics(loss: float, skipped: float = 0.0) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(loss), "grad_norm": torch.tensor(0.5), "skipped": torch.tensor(skipped)}


@pytest.mark.parametrize(("loss", "skipped"), [(math.nan, 1.0), (math.inf, 0.0), (2.0, 1.0)])
def test_a_step_that_is_not_finite_is_marked(loss: float, skipped: float) -> None:
    found: list[Record] = []
    counted = meter(found)
    counted.push(6, metrics(2.0))
    counted.push(7, metrics(loss, skipped))
    counted.flush()
    assert [(each.step, each.grad_norm, each.skipped) for each in found] == [(6, 0.5, False), (7, 0.5, True)]


def test_flops_of_a_token() -> None:
    """Of models whose multiplied weights and attention a trace counts in tests/models/test_families_on_ranks.py."""
    for name in ("debug", "debug-mixtral"):
        model = models.CONFIGS[name]
        assert per_token(model, 100) == 6 * model.multiplied + 12 * model.layers * model.attended * 100
    assert peak(torch.device("cpu")) is None
