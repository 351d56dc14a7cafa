"""A run's folder, how a run begins and how it is taken up again.

runs/NAME/   config.json   metrics.jsonl   tensorboard/   checkpoints/   lock
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

import yafsdp_fn as ya
from models import llama
from train import lock
from train.config import Config, ConfigError, differences, from_json, require, to_json
from train.data import Corpus, Place, split
from train.elastic import Attempt
from train.report import say_apart
from train.spikes import Spikes
from train.together import on_rank_0
from yafsdp_fn import checkpoint
from yafsdp_fn.disk import replace

FIXED = ("runs", "name", "model", "seed", "data.files", "data.heldout_files", "data.heldout_fraction", "data.seq_len")
"""What a resumed run cannot change: the checkpoint would not fit, or its position would mean other text."""


def parse(argv: Sequence[str], *, quiet: bool) -> Config:
    """The config from the command line. With --resume the run's own config.json gives the defaults of all flags."""
    prog = "python -m train clm"
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():  # refused settings, too
        config = tyro.cli(Config, args=argv, prog=prog, console_outputs=not quiet)
    if not config.resume:
        return config
    stays = bool(config.name) or not Attempt.of().most
    require(stays, "--resume with --max-restarts needs --name: the newest run may be another one by then")
    folder = config.runs / config.name if config.name else newest(config.runs)
    saved = dataclasses.replace(from_json(folder / "config.json"), resume=True, runs=config.runs, name=folder.name)
    config = tyro.cli(Config, args=argv, prog=prog, console_outputs=not quiet, default=saved)
    for field, (old, new) in differences(saved, config).items():
        if field in FIXED:
            raise ConfigError(f"--resume: {field} was {old!r} and cannot become {new!r}; start a new run for that")
    return config


def newest(runs: Path) -> Path:
    """The run that was started or resumed last."""
    found = list(runs.glob("*/config.json"))
    if not found:
        raise ConfigError(
            f"{runs.resolve()} holds no run: start one with `python -m train clm`, or name another folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


@contextlib.contextmanager
def claimed(config: Config) -> Iterator[Config]:
    """Holds the run's folder, on rank 0. Gives the config with the run's name, and with `resume` where this start goes
    on by itself with what an earlier one left. Raises ConfigError, on all ranks, where the run cannot begin so."""
    with contextlib.ExitStack() as stack:
        yield on_rank_0(lambda: _claim(config, Attempt.of(), stack), "claiming the folder of the run")


def _claim(config: Config, attempt: Attempt, stack: contextlib.ExitStack) -> Config:
    config = dataclasses.replace(config, name=config.name or new_name(attempt))
    folder = config.runs / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = stack.enter_context(lock.held(folder, attempt.run_id))
        if attempt.restarts(str(earlier.get("run_id", ""))):  # killed before its first checkpoint it begins anew
            config = dataclasses.replace(config, resume=checkpoint.latest(folder / "checkpoints") is not None)
        check_folder(config)
    except OSError as error:
        raise ConfigError(f"--runs {config.runs}: {folder} cannot be used: {error}") from None
    try:
        replace(folder / "config.json", to_json(config).encode())
    except OSError as error:
        require(config.resume, f"--runs {config.runs}: {folder / 'config.json'} cannot be written: {error}")
        say_apart(f"warning: {folder / 'config.json'} stays as it was: {error}")
    return config


def new_name(attempt: Attempt) -> str:
    """Of a run without --name: by the clock, or, where restarts must find it again, by what all of them are told."""
    if not attempt.most:
        return time.strftime("clm-%Y%m%d-%H%M%S")
    require(bool(attempt.run_id), "restarts must find the run again: give --name, or give torchrun --rdzv-id")
    return f"clm-{attempt.run_id}"


def check_folder(config: Config) -> Path:
    """The run's folder; refuses to write a new run over the checkpoints of another, and to resume from none."""
    folder = config.runs / config.name
    last = checkpoint.latest(folder / "checkpoints")
    if config.resume and last is None:
        raise ConfigError(
            f"--resume: {folder / 'checkpoints'} holds no complete checkpoint; start anew without --resume"
        )
    if not config.resume and last is not None:
        raise ConfigError(
            f"{folder} already has {last.name}: continue that run with --resume, or give this one another --name"
        )
    return folder


def text(config: Config, ranks: int) -> tuple[Corpus, Corpus]:
    """`(training, held-out)` text, enough for this config."""
    rows = ranks * config.data.batch
    corpus, heldout = split(config.data)
    corpus.require(rows, "a step")
    if config.eval_every:
        heldout.require(rows, "an evaluation (none with --eval-every 0)")
    return corpus, heldout


def extra(config: Config, text: str, position: int, spikes: Spikes | None) -> dict[str, Any]:
    """What a checkpoint keeps beside the state. text: the training text's fingerprint"""
    more = {} if spikes is None else {"spikes": spikes.kept()}
    return {"position": position, "text": text, "sharding": str(config.sharding), **more}


def resumed(extra: Mapping[str, Any], state: ya.ShardedState, config: Config, text: str) -> ya.Program | None:
    """The program to go on with, None where the sharding is another than it was. Refuses what cannot go on."""
    if extra["text"] != text:
        raise ConfigError(
            "--resume: the text is not that of the run (files were added, removed or changed), so the position in it "
            "means nothing; restore the files, or start a new run"
        )
    if state.step >= config.steps and not Attempt.of().number:  # else a rank was killed after the last checkpoint
        raise ConfigError(f"--resume: the run has had its {config.steps} steps; for more of them, raise --steps")
    return state.program if extra.get("sharding") == str(config.sharding) else None


def headline(config: Config, model: llama.Config, place: Place, corpus: Corpus, heldout: Corpus) -> str:
    """What is about to run, in two lines."""
    tokens = place.ranks * config.data.batch * config.data.seq_len
    return (
        f"{config.runs / config.name}: {config.model}, {model.num_parameters / 1e6:.2f}M parameters, {place.ranks} x "
        f"{place.device.type}, {config.sharding.schedule}, {tokens:,} tokens a step\n"
        f"text: {corpus.nbytes / 1e6:.1f} MB in {len(corpus.files)} files; "
        f"held out: {heldout.nbytes / 1e6:.2f} MB in {len(heldout.files)} other files"
    )


def last_checkpoint(config: Config) -> str:
    """Where a failed run can be taken up, as a sentence."""
    last = checkpoint.latest(config.runs / config.name / "checkpoints") if config.name else None
    if last is None:
        return "There is no checkpoint yet."
    return f"The last checkpoint is {last}; continue from it with --name {config.name} --resume"
