"""A run of `python -m train clm` inside of the pool's ranks, on a tiny model, with something done before each step.

    pools[2].run(inside, ("--runs", ...), hook, *arguments)

hook: `(times, reader, *arguments)`, called on every rank before the batch is read that is the `times`-th one, from 1
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import models
from models import gpt2, llama, mixtral
from tests.harness.pool import Pools
from train import clm, sample, sft
from train.data.rows import Batch, Reader
from train.running import files, loop, run, together
from train.settings import Config, Tuning
from train.trained.loaded import load

SHAPE = {"vocab": 256, "embed": 16, "ffn": 24, "layers": 2, "heads": 2, "max_length": 64}
HEADS = {**SHAPE, "kv_heads": 2, "head_dim": 8}
TINY = llama.Config(**HEADS)
MODELS = {
    "tiny": TINY,
    "tiny-gpt2": gpt2.Config(**SHAPE),
    "tiny-mixtral": mixtral.Config(**HEADS, experts=4, router_loss=True, router_coef=0.1),
    "tiny-mixtral-3": mixtral.Config(**HEADS, experts=3, router_loss=True, router_coef=0.1),
}
WINDOW = 8

Hook = Callable[..., None]


class Run(NamedTuple):
    """Of one rank. error: `type: text`, or nothing; read: the rows of each batch, in order, a token a character"""

    error: str
    err: str
    read: list[list[str]]


def text(folder: Path, windows: int) -> Path:
    """A file of so many windows, no two alike; it ends inside the last one, whose end is the separator."""
    path = folder / "text.txt"
    path.write_text("".join(f"{i:0{WINDOW}d}" for i in range(windows)))
    return path


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    base = {
        "--runs": folder / "runs",
        "--name": "a",
        "--model": "tiny",
        "--data.files": folder / "text.txt",
        "--data.heldout-fraction": 0,
        "--data.seq-len": WINDOW,
        "--data.batch": 2,
        "--optim.warmup": 2,
        "--steps": 12,
        "--eval-every": 0,
        "--checkpoint-every": 4,
        "--timeline-every": 0,  # for which each start traces a step
        "--device": "cpu",
    }
    return (*(str(part) for pair in base.items() for part in pair), *more)


def without(argv: Sequence[str], *names: str) -> tuple[str, ...]:
    """The flags but for these and their values."""
    kept = list(argv)
    for name in names:
        at = kept.index(name)
        del kept[at : at + 2]
    return tuple(kept)


def lines(folder: Path, name: str = "a", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """What a run has written, a line each."""
    return [json.loads(line) for line in (folder / "runs" / name / file).read_text().splitlines()]


def losses(folder: Path, name: str = "a") -> list[float]:
    return [line["loss"] for line in lines(folder, name) if "loss" in line]


def resumed(folder: Path, *more: str) -> Config:
    """The settings with which the run `a` in the folder goes on."""
    return run.parse(["--runs", str(folder), "--name", "a", "--resume", *more], Config, quiet=False)


def of_others(folder: Path, **settings: Any) -> Path:
    """The folder, with a run `a` in it of which somebody else wrote the config."""
    (folder / "a").mkdir()
    (folder / "a" / "config.json").write_text(json.dumps(settings))
    return folder


def fine(ranks: list[Run]) -> list[Run]:
    """Expects no error of any rank."""
    assert [one.error for one in ranks] == [""] * len(ranks), ranks
    return ranks


def tiny() -> contextlib.AbstractContextManager[Any]:
    """While `MODELS` are names of models."""
    return mock.patch.dict(models.CONFIGS, MODELS)


def said(mesh: Any, *argv: str) -> str:
    """What `python -m train sample` prints on this rank."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        tiny(),
        mock.patch.dict(os.environ, COLUMNS="200"),
    ):
        config = sample.parsed(["--device", "cpu", *argv])
        sample.show(config, load(config.source))
    return out.getvalue()


def spoken(mesh: Any, folder: Path, *more: str) -> str:
    """The same of a run."""
    return said(mesh, "--run", str(folder), *more)


def nothing(times: int, reader: Reader) -> None:
    """A run in which nothing happens."""


def inside(mesh: Any, argv: tuple[str, ...], hook: Hook = nothing, *arguments: Any) -> Run:
    return _inside(mesh, Config, clm.job, argv, hook, *arguments)


def tuned(mesh: Any, argv: tuple[str, ...], hook: Hook = nothing, *arguments: Any) -> Run:
    """The same of `python -m train sft`."""
    return _inside(mesh, Tuning, sft.job, argv, hook, *arguments)


def _inside(mesh: Any, kind: Any, job_of: Any, argv: tuple[str, ...], hook: Hook, *arguments: Any) -> Run:
    err = io.StringIO()
    read = []
    next_batch = Reader.next

    def next_of(self: Reader) -> Batch:
        hook(len(read) + 1, self, *arguments)
        batch = next_batch(self)
        read.append(["".join(map(chr, row.tolist())) for row in batch["tokens"]])
        return batch

    error = ""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(err),
        contextlib.redirect_stdout(io.StringIO()),
        tiny(),
    ):
        patch.setattr(Reader, "next", next_of)
        patch.setattr(files, "PATIENCE", 0.2)  # a run that is over holds its folder no longer
        patch.setattr("gc.unfreeze", lambda: None)  # later collections of this process need not look at all libraries
        patch.setenv("WORLD_SIZE", str(mesh.size()))
        try:
            config, job, texts = loop.prepare(argv, kind, job_of, quiet=False)
            together.alike(together.facts(config, texts))
            with run.claimed(config, job.tokenizer) as config:
                loop.train(config, mesh, job)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Run(error, err.getvalue(), read)


class Runs(NamedTuple):
    """Runs named `a`, in one folder, on a text of 200 windows.

    by: what ranks run; given: what that takes besides the flags, as a hook
    """

    pools: Pools
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "a"

    def __call__(self, ranks: int, *more: str, by: Any = inside, given: tuple[Any, ...] = ()) -> list[Any]:
        return self.pools[ranks].run(by, flags(self.folder, *more), *given)

    def fine(self, ranks: int, *more: str, **how: Any) -> list[Run]:
        """Expects no error of any rank."""
        return fine(self(ranks, *more, **how))


class Killed(Exception):
    """What ends a run in these tests, on all ranks at once."""


def killed(times: int, reader: Reader, at: int) -> None:
    if times == at:
        raise Killed


def rank() -> int:
    return int(os.environ["RANK"])
