"""A run's folder, how a run begins and how it is taken up again.

runs/NAME/   config.json   metrics.jsonl   tensorboard/   checkpoints/   tokenizer/   lock
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

import yafsdp_fn as ya
from models.parts.config import Shape
from train.command_line import cli, say_apart
from train.config import AUTO, SAVED, ConfigError, Mesh, is_own, require
from train.config_json import C, differences, from_json, to_json
from train.data.rows import Place, Position, Rows, at_most, typed_as
from train.data.tokenizer import Tokenizer, load
from train.machine import cpu, revision
from train.running import files, setup
from train.running.elastic import Attempt
from train.running.files import refuse_links
from train.running.saves import WINDOW, Spikes
from train.running.together import on_rank_0
from train.settings import Config, Settings
from yafsdp_fn import checkpoint
from yafsdp_fn.util.disk import replace
from yafsdp_fn.util.words import counted

FIXED = ("runs", "name", "model", "vocab", "seed", "start", "tokenizer")
"""Settings that a resumed run cannot change, besides its data and its adapters: the checkpoint would not fit, or its
position would mean other text."""
FREE = ("data.batch",)
CACHE = ".tokens"
"""Beside the runs: tokens of texts, made once for all of them."""
TOKENIZER = "tokenizer"
"""The folder of a run that keeps its tokenizer."""


def parse(argv: Sequence[str], kind: type[C], *, quiet: bool) -> C:
    """The config from the command line. With --resume the run's own config.json gives the defaults of all flags."""

    def read(default: Any = tyro.MISSING_NONPROP) -> C:
        prog = f"python -m train {kind.COMMAND}"
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():  # refused settings, too
            found: C = cli(kind, argv, prog, console_outputs=not quiet, default=default)
            return found

    given = _given(argv)
    if not given.resume:
        config = read()
        require(config.sharding.schedule != SAVED, f"sharding.schedule is {SAVED!r}: for runs that --resume")
        return config
    if not given.name and Attempt.of().most:
        raise ConfigError("--resume with --max-restarts needs --name: the newest run may be another one by then")
    folder = given.runs / given.name if given.name else newest(given.runs, kind)
    earlier = from_json(folder / "config.json", kind)
    code = " ".join(getattr(earlier.data, "pipelines", ()))
    require(
        code == " ".join(given.pipelines),
        f"--resume: the run reads {code or 'no pipelines'}, and a file does not say what code to run: only the command "
        f"line does{f', --data.pipelines {code}' * bool(code)}",
    )
    sharding = earlier.sharding
    if is_own(sharding.schedule):  # a file does not say what code to run: only the command line does
        sharding = dataclasses.replace(sharding, schedule=SAVED)
    saved = dataclasses.replace(earlier, log="", sharding=sharding, resume=True, runs=given.runs, name=folder.name)
    config = read(saved)
    for field, (old, new) in differences(saved, config).items():
        in_8_bits = field == "optim.moments" and "int8" in (old, new)  # of other shapes; whole and host are alike
        if in_8_bits or field in FIXED or (field.startswith(("data.", "lora.")) and field not in FREE):
            raise ConfigError(f"--resume: {field} was {old!r} and cannot become {new!r}; start a new run for that")
    return config


def _given(argv: Sequence[str]) -> argparse.Namespace:
    """Reads which run is meant: what must be known before the defaults of all other flags are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--runs", type=Path, default=Settings.runs)
    parser.add_argument("--name", default="")
    parser.add_argument("--data.pipelines", dest="pipelines", nargs="*", default=[])
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_known_args(list(argv))[0]
    return argparse.Namespace(resume=False)  # a flag without its value: refused by the parser of all flags


def newest(runs: Path, *kinds: type[Settings]) -> Path:
    """The run of one of these kinds that was started or resumed last."""
    commands = [kind.COMMAND for kind in kinds]
    found = [path for path in runs.glob("*/config.json") if command_of(path) in commands]
    if not found:
        raise ConfigError(
            f"{runs.resolve()} holds no run: start one with `python -m train {' or '.join(commands)}`, or name another "
            "folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def is_run(folder: Path) -> bool:
    """Tells whether this is the folder of a run, as far as it can be told."""
    return (folder / "checkpoints").is_dir() or '"sharding"' in _text(folder / "config.json")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def command_of(path: Path) -> str:
    """The subcommand whose config.json this is, as far as it can be told."""
    try:
        return str(json.loads(_text(path)).get("command", Config.COMMAND))
    except (ValueError, AttributeError, RecursionError):
        return Config.COMMAND  # damaged: who reads it will say so


@contextlib.contextmanager
def claimed(config: C, tokenizer: Tokenizer) -> Iterator[C]:
    """Holds the run's folder, on rank 0. Gives the config with the run's name, and with `resume` where this start goes
    on by itself with what an earlier one left. Raises ConfigError, on all ranks, where the run cannot begin so."""
    with contextlib.ExitStack() as stack:
        yield on_rank_0(lambda: _claim(config, tokenizer, Attempt.of(), stack), "claiming the folder of the run")


def _claim(config: C, tokenizer: Tokenizer, attempt: Attempt, stack: contextlib.ExitStack) -> C:
    config = dataclasses.replace(config, name=config.name or new_name(config.COMMAND, attempt))
    folder = config.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        earlier = stack.enter_context(files.held(folder, attempt.run_id))
        if attempt.restarts(str(earlier.get("run_id", ""))):  # killed before its first checkpoint it begins anew
            config = dataclasses.replace(config, resume=checkpoint.latest(folder / "checkpoints") is not None)
        check_folder(config)
        if not config.resume:
            _keep_tokenizer(tokenizer, folder)
    except OSError as error:
        raise ConfigError(f"--runs {config.runs}: {folder} cannot be used: {error}") from None
    return config


def _keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Into a new folder: its library would write through links in one that is there."""
    partial = folder / f"{TOKENIZER}.partial"
    kept = folder / TOKENIZER
    for path in (partial, kept):
        if path.is_dir():
            shutil.rmtree(path)
    tokenizer.save(partial)
    if partial.is_dir():  # of bytes the name is enough
        partial.rename(kept)


def keep(config: Settings) -> None:
    """Writes config.json, on rank 0, once nothing of the settings has been refused: it is what makes a folder a run."""

    def write() -> None:
        path = config.folder / "config.json"
        try:
            replace(path, to_json(config).encode())
        except OSError as error:
            require(config.resume, f"--runs {config.runs}: {path} cannot be written: {error}")
            say_apart(f"warning: {path} stays as it was: {error}")

    on_rank_0(write, "writing the settings of the run")


def new_name(command: str, attempt: Attempt) -> str:
    """Names a run without --name: by the clock, or, where restarts must find it again, by what all of them are told."""
    if not attempt.most:
        return time.strftime(f"{command}-%Y%m%d-%H%M%S")
    require(bool(attempt.run_id), "restarts must find the run again: give --name, or give torchrun --rdzv-id")
    return f"{command}-{attempt.run_id}"


def check_folder(config: Settings) -> Path:
    """The run's folder; refuses to write a new run over the checkpoints of another, and to resume from none."""
    folder = config.folder
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


def tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run that begins, or, where it is resumed, its own copy."""
    return load(tokenizer_name(config, config.folder) if config.resume else config.data.tokenizer)


def tokenizer_name(config: Config, folder: Path) -> str:
    """The name to load the tokenizer of the run in `folder` by: its copy, wherever the tokenizer came from."""
    return str(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else config.data.tokenizer


def settled(config: C, training: Rows, heldout: Rows, ranks: int) -> C:
    """The settings, with a batch and evaluations that the text has rows for where they were not given. Raises
    ConfigError where it has too few. ranks: those that rows go to"""
    data = config.data
    every = config.eval_every
    if data.batch == AUTO:
        parts = config.sharding.microbatches * config.sharding.chunks
        there = at_most(training) // ranks // parts * parts
        data = dataclasses.replace(data, batch=max(parts, min(data.usual, there)))
    training.require(ranks * data.batch, "a step")
    if every == AUTO:
        every = 100 if at_most(heldout) >= ranks else 0
    if every:
        heldout.require(ranks, "an evaluation (none with --eval-every 0)")
    return dataclasses.replace(config, data=data, eval_every=every)


def extra(config: Settings, texts: Mapping[str, str], position: Position, spikes: Spikes | None) -> dict[str, Any]:
    """Facts that a checkpoint keeps beside the state. texts: fingerprints, as `resumed` compares them"""
    more = {} if spikes is None else {"spikes": spikes.kept()}
    return {"position": position, **texts, "seed": config.seed, "sharding": _sharding(config), **more}


def checked(extra: Mapping[str, Any], rows: Rows, seed: int, where: str) -> None:
    """Refuses an `extra` that no run has written, since checkpoints come from other people. where: the file with it"""
    begins = f"{where}: extra."
    typed_as(str, extra.get("text"), f"{begins}text")
    typed_as(str, extra.get("sharding", ""), f"{begins}sharding")
    kept = typed_as(Spiky, extra.get("spikes", []), f"{begins}spikes")
    require(len(kept) <= WINDOW, f"{begins}spikes: expected at most {WINDOW}, got {len(kept)}")
    try:
        rows.cursor(extra.get("position"), seed)
    except ConfigError as error:
        raise ConfigError(f"{begins}position: {error}") from None


Spiky = tuple[tuple[float, float], ...]
"""A loss and a gradient norm of each of the last steps."""


def compared(folder: Path, config: Settings, step: int, warn: Callable[[str], None]) -> None:
    """Warns of another learning rate at `step` than the run of the folder had."""
    with contextlib.suppress(ConfigError):
        earlier = from_json(folder / "config.json", type(config))
        was, now = (setup.learning_rate(each.optim, each.steps)(step) for each in (earlier, config))
        if was != now:
            warn(f"after step {step} the learning rate is {now:.2e}, not {was:.2e}: --steps or --optim are others")


def resumed(
    extra: Mapping[str, Any],
    state: ya.ShardedState,
    config: Settings,
    texts: Mapping[str, str],
    warn: Callable[[str], None],
) -> Any:
    """The program to go on with, None where the sharding is another than it was. Refuses what cannot go on.

    texts: fingerprints of the training text, `text`, and of the held-out one, `heldout`, where there are evaluations
    """
    seed = extra.get("seed", config.seed)
    require(
        seed == config.seed,
        f"--resume: the checkpoint is of a run of seed {seed!r:.60}, the settings have seed {config.seed}: its "
        "position would mean other text; give the settings that it was trained with, or start a new run",
    )
    if extra.get("heldout", texts.get("heldout")) != texts.get("heldout", extra.get("heldout")):
        warn("the held-out text is not what it was: held-out losses before this start and after it are of other text")
    if extra["text"] != texts["text"]:
        raise ConfigError(
            "--resume: the text is not that of the run (files were added, removed or changed), so the position in it "
            "means nothing; restore the files, or start a new run"
        )
    if state.step >= config.steps and not Attempt.of().number:  # else a rank was killed after the last checkpoint
        raise ConfigError(f"--resume: the run has had its {config.steps} steps; for more of them, raise --steps")
    same = extra.get("sharding") == _sharding(config) and not is_own(config.sharding.schedule)
    return state.program if same or config.sharding.schedule == SAVED else None


def _sharding(config: Settings) -> str:
    stages = config.stages
    return str(config.sharding) if stages == Mesh() else f"{config.sharding} {stages}"


def headline(config: Settings, name: str, model: Shape, place: Place, training: Rows, heldout: Rows) -> str:
    """Says in three lines what is about to run."""
    rows = place.ranks * config.data.batch
    tokens = rows * config.data.seq_len
    times = config.steps * rows / at_most(training)
    again = f"; {counted(config.steps, 'step')} of {counted(rows, 'row')} read it {times:,.0f} times" * (times >= 10)
    held = heldout.describe() if at_most(heldout) else "nothing"
    if not config.eval_every:
        held += ", so no evaluations; --data.heldout-files names some" if held == "nothing" else ", no evaluations"
    return (
        f"{config.folder}: {name}, {model.num_parameters / 1e6:.2f}M parameters, {place.devices} x "
        f"{place.device.type}, {config.stages.named}{config.sharding.schedule}, {tokens:,} tokens a step\n"
        f"text: {training.describe()}{again}\nheld out: {held}"
    )


def last_checkpoint(config: Settings) -> str:
    """Says where a failed run can be taken up."""
    last = checkpoint.latest(config.folder / "checkpoints") if config.name else None
    if last is None:
        return "There is no checkpoint yet."
    return f"The last checkpoint is {last}; continue from it with --name {config.name} --resume"


def this_start(place: Place) -> dict[str, Any]:
    """JSON, of rank 0's machine; others are taken to be like it.

    Its command, ranks, device, versions, commit. Written down, not compared: ranks that differ are refused elsewhere
    (`together`).
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place.devices))
    return {
        "command": shlex.join(["python", "-m", "train", *sys.argv[1:]]),  # can be typed again, without a launcher
        "attempt": Attempt.of().number,
        "host": socket.gethostname(),
        "ranks": place.devices,
        "machines": -(-place.devices // local),
        "kind": place.device.type,
        "device": device(place.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "commit": revision("--abbrev=12", "--dirty=+"),  # with a `+` where files differ from it
    }


def device(where: torch.device) -> str:
    """The name of the GPU, or of the processor as far as the system tells."""
    if where.type == "cuda":
        memory = torch.cuda.get_device_properties(where).total_memory
        return f"{torch.cuda.get_device_name(where)}, {memory / 2**30:.0f} GiB"
    return f"{cpu()}, {os.cpu_count()} cores"
