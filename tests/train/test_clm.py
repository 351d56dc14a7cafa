"""`python -m train clm` and `sample` as a user starts them: a whole run, one that is killed, one that is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness import small
from tests.train.ranks import Ended, run
from train import clm
from train.launch import command as launch
from train.running import setup
from yafsdp_fn import checkpoint

pytestmark = pytest.mark.timeout(600)  # whole runs, whatever else this machine has to do
STEPS = 30
EVERY = 10
Unbroken = tuple[Path, list[Ended]]
"""The folder of runs, and how ranks ended."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some small files; which are held out depends on their names alone."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"line {i} of a text that is easy to learn\n" * 20)
    return folder


def flags(runs: Path, text: Path, *more: str) -> tuple[str, ...]:
    base = {
        "--runs": runs,
        "--name": "a",
        "--data.files": f"{text}/*.txt",
        "--data.heldout-fraction": 0.2,
        "--data.seq-len": 16,
        "--data.batch": 2,
        "--steps": STEPS,
        "--optim.warmup": 4,
        "--eval-every": 8,
        "--eval-batches": 2,
        "--checkpoint-every": EVERY,
        "--timeout": 300,  # of a collective
        "--device": "cpu",
    }
    return ("clm", *(str(part) for pair in base.items() for part in pair), *more)


def metrics(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]


def losses(runs: Path) -> list[tuple[str, int, float]]:
    """Everything about a run that must not depend on how often it was interrupted."""
    keys = ("loss", "eval_loss", "grad_norm", "lr")
    return [(key, line["step"], line[key]) for line in metrics(runs) for key in keys if key in line]


def last_step(runs: Path) -> int:
    path = runs / "a" / "metrics.jsonl"
    found = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in found if line.endswith("}")), default=-1)


def fine(ended: list[Ended]) -> list[Ended]:
    assert [each.status for each in ended] == [0] * len(ended), ended
    return ended


def newest(runs: Path) -> str:
    found = checkpoint.latest(runs / "a" / "checkpoints")
    assert found is not None
    return found.name


def signalled(name: str, step: int) -> tuple[str, ...]:
    """What runs in place of `train`."""
    return ("tests.train.signalled", name, str(step))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Unbroken:
    runs = tmp_path_factory.mktemp("unbroken")
    return runs, fine(run(2, *flags(runs, text)))


def test_a_run_leaves_what_it_should(unbroken: Unbroken) -> None:
    runs, ended = unbroken
    folder = runs / "a"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.json",
        "events.jsonl",
        "lock",
        "metrics.jsonl",
        "tensorboard",
        "timeline.json",
    }
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "latest",
        "step-00000020",
        "step-00000030",
    ]
    assert json.loads((folder / "config.json").read_text())["steps"] == STEPS
    lines = metrics(runs)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 8, 16, 24, 30]
    fields = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "mem_bytes"}
    assert all(set(line) == fields for line in lines if "loss" in line)
    first, *_, last = (line["eval_loss"] for line in lines if "eval_loss" in line)
    assert abs(first - 5.545) < 0.2
    assert last < first - 1
    assert "held-out loss" in ended[0].out
    assert "checkpoint" in ended[0].out
    assert ended[1].out == ""
    assert all(e.err == "" for e in ended)


@pytest.mark.nightly  # by day a restart (running/test_runs.py) and a resumed program (running/test_own_schedules.py)
def test_a_run_that_is_killed_and_then_stopped_has_the_bits_of_an_unbroken_one(
    tmp_path: Path, text: Path, unbroken: Unbroken
) -> None:
    survivor, killed = run(2, *flags(tmp_path, text), module=signalled("SIGKILL", EVERY + 3))
    assert killed.status == -signal.SIGKILL
    assert survivor.status == 1
    assert "error: rank 0: " in survivor.err and "step" in survivor.err, survivor.err
    assert any(op in survivor.err for op in ("gather of ", "reduce of ", "all-reduce")), survivor.err
    assert "The last checkpoint is" in survivor.err
    assert "--name a --resume" in survivor.err
    reached = last_step(tmp_path)
    assert EVERY <= reached <= EVERY + 3

    ended = run(
        2, *flags(tmp_path, text, "--resume"), module=signalled("SIGINT", 18)
    )  # it stops before the evaluation of 24
    assert [(e.status, e.err) for e in ended] == [(0, ""), (0, "")]
    stopped = last_step(tmp_path)
    assert reached < stopped < STEPS
    assert f"stopped by a signal after step {stopped}; continue with --name a --resume" in ended[0].out
    assert newest(tmp_path) == f"step-{stopped:08d}"
    assert losses(tmp_path) == [entry for entry in losses(unbroken[0]) if entry[1] <= stopped]

    fine(run(2, *flags(tmp_path, text, "--resume")))
    assert losses(tmp_path) == losses(unbroken[0])


def test_chunks_reach_the_loss_that_is_trained(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trained(Exception):
        """Carries the loss."""

    def train_step(loss: object, *_: object, **__: object) -> None:
        raise Trained(loss)

    monkeypatch.setattr(setup, "mesh", lambda *_: small.one_rank())
    monkeypatch.setattr(llama, "loss", lambda config, chunks=1, **_: chunks)
    monkeypatch.setattr(ya, "train_step", train_step)
    with pytest.raises(Trained) as found:
        told(flags(tmp_path, text, "--sharding.chunks", "2"))
    assert found.value.args == (2,)


def test_a_sample_continues_the_prompt(unbroken: Unbroken) -> None:
    sample = ("sample", "--run", str(unbroken[0] / "a"), "--prompt", "line ", "--length", "20", "--device", "cpu")
    (ended,) = run(1, *sample)
    assert ended.status == 0
    assert ended.err == ""
    rule, text, *_ = ended.out.splitlines()
    assert "step 30" in rule
    assert "trained on sequences of 16 tokens" in ended.out
    assert text.startswith("line ")


@pytest.mark.parametrize(
    ("more", "text_of_error"),
    [
        (
            ("--optim.learning-rate", "1e30", "--optim.warmup", "0"),
            "gradient norm nan: their updates were skipped, and there is nothing to go back to: ",
        ),
        (("--data.seq-len", "100000"), "error: training text: "),
    ],
)
def test_errors_are_sentences(tmp_path: Path, text: Path, more: tuple[str, ...], text_of_error: str) -> None:
    (ended,) = run(1, *flags(tmp_path, text, *more))
    assert ended.status == launch.CANNOT_WORK
    assert text_of_error in ended.err and "Traceback" not in ended.err, ended.err


def test_a_truncated_checkpoint_is_named_and_an_earlier_one_serves(
    tmp_path: Path, text: Path, unbroken: Unbroken
) -> None:
    shutil.copytree(unbroken[0] / "a", tmp_path / "a")
    newest = tmp_path / "a" / "checkpoints" / "step-00000030"
    os.truncate(newest / "rank-00001.safetensors", 1000)
    ended = fine(run(2, *flags(tmp_path, text, "--resume")))
    assert "warning: " in ended[0].err
    assert str(newest) in ended[0].err
    assert "passed over" in ended[0].err
    assert ended[1].err == ""
    assert losses(tmp_path) == losses(unbroken[0])


# ---- found before ranks meet


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot meet."""

    def mesh(*_: object) -> None:
        raise AssertionError("ranks were to meet first")

    monkeypatch.setattr(setup, "mesh", mesh)


def told(argv: tuple[str, ...]) -> int:
    """The status of the subcommand, in this process."""
    try:
        return clm.main(argv[1:])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--optim.warmup", "50"), "optim.warmup 50 is not shorter than the run, steps 30"),
        (("--data.heldout-fraction", "0.001"), "held-out text"),
        (("--data.seq-len", "100000"), "training text"),
        (("--data.batch", "0"), "data.batch is 0"),
    ],
)
def test_refusals_come_before_ranks_meet_and_from_rank_0_alone(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert told(flags(tmp_path, text, *more)) != 0
    shown = capsys.readouterr()
    said = " ".join((shown.out + shown.err).replace("│", " ").split())
    assert said.count(message) == (rank == 0), said


def test_cuda_without_cuda_is_said(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert told(flags(tmp_path, text, "--device", "cuda")) == launch.CANNOT_WORK
    assert "error: --device cuda: torch sees no CUDA device here" in capsys.readouterr().err
