"""Reads a run's folder as data. Raises ConfigError where it is not what a run leaves.

config.json     always there          events.jsonl   starts, warnings, ends; not there in runs of before
metrics.jsonl   steps and held-out    timeline.json  one recorded step; the same
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import yafsdp_fn as ya
from train.config import ConfigError, require
from train.config_json import from_json
from train.data.rows import Count, typed_as
from train.running.run import TOKENIZER, command_of
from train.settings import Settings
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.schema import Limits

Row = dict[str, Any]
T = TypeVar("T")
Figure = Annotated[float, Limits(-(2.0**62), 2.0**62)]


class Numbers(NamedTuple):
    """The numbers that the page takes from a line of metrics.jsonl."""

    step: Count
    loss: Figure | None = None
    eval_loss: Figure | None = None
    grad_norm: Figure | None = None
    lr: Figure | None = None
    tokens_per_s: Figure | None = None
    step_ms: Figure | None = None
    mem_bytes: Figure | None = None
    mfu: Figure | None = None


class Event(NamedTuple):
    """An event of events.jsonl, without the words that the page shows as they are."""

    event: str
    time: str
    kind: Literal["cpu", "cuda"] = "cpu"
    unit: Literal["byte", "token"] = "byte"
    step: Count = 0
    attempt: Count = 0
    ranks: Count = 1
    machines: Count = 1
    threads: Count = 1
    parameters: Count = 0
    tokens: Count = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, read from its folder.

    steps, evaluations: rows of metrics.jsonl, in order of their steps; age: seconds since that was written

    recorded: the step of `timeline`, which ran `program`; machine: figures that the run measured, of its newest start
    """

    name: str
    folder: Path
    config: Settings
    steps: list[Row]
    evaluations: list[Row]
    events: list[Row]
    recorded: int
    timeline: ya.timeline.Timeline | None
    program: ya.Program | None
    machine: ya.planner.Cluster | None
    age: float

    def of(self, event: str) -> list[Row]:
        return [each for each in self.events if each["event"] == event]

    def series(self, key: str) -> list[tuple[float, float]]:
        """`(step, value)` where there is a value."""
        rows = self.evaluations if key == "eval_loss" else self.steps
        return [(row["step"], row[key]) for row in rows if row.get(key) is not None]

    @property
    def start(self) -> Row:
        """The newest start, empty where none was written down."""
        return (self.of("start") or [{}])[-1]

    @property
    def unit(self) -> str:
        """The unit that a loss is the mean over: "byte" or "token". Where no start says it, a run that kept a tokenizer
        read no bytes."""
        kept = "token" if (self.folder / TOKENIZER).is_dir() else "byte"
        unit: str = self.start.get("unit", kept)
        return unit

    def counts_as(self, other: Run) -> bool:
        """True if tokens are the same in both, as far as it is known: those of two tokenizers have other lengths."""
        if "byte" in (self.unit, other.unit):
            return self.unit == other.unit
        mine = self.start.get("tokenizer")
        return mine is not None and mine == other.start.get("tokenizer")


def read(folder: Path) -> Run:
    require(
        folder.is_dir(), f"{folder} is no folder of a run: expected one that `python -m train clm` made, as runs/NAME"
    )
    config = from_json(folder / "config.json", kind_of(folder / "config.json"))
    metrics = folder / "metrics.jsonl"
    require(metrics.is_file(), f"{metrics} does not exist: the run has not come to its first step")
    rows = _lines(metrics, Numbers)
    events = _lines(folder / "events.jsonl", Event)
    recorded, timeline, program = _timeline(folder / "timeline.json")
    return Run(
        folder.resolve().name,
        folder,
        config,
        [row for row in rows if "eval_loss" not in row],
        [row for row in rows if "eval_loss" in row],
        events,
        recorded,
        timeline,
        program,
        _machine(events, folder / "events.jsonl"),
        time.time() - metrics.stat().st_mtime,
    )


def kinds() -> list[type[Settings]]:
    """The settings of every subcommand that trains."""
    return Settings.__subclasses__()


def kind_of(path: Path) -> type[Settings]:
    command = command_of(path)
    known = {kind.COMMAND: kind for kind in kinds()}
    require(command in known, f"{path} is of `python -m train {command}`, which there is not")
    return known[command]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _lines(path: Path, kind: Any) -> list[Row]:
    """The object of every line, whose fields are as a `kind` says; the last may be cut short, by a kill."""
    found: list[Row] = []
    lines = _text(path).splitlines() if path.exists() else []
    for at, line in enumerate(lines, 1):
        where = f"{path}, line {at}"
        try:
            row = strict_json.loads(line)
        except ValueError as error:
            if at == len(lines):
                break
            raise ConfigError(f"{where}, is no JSON: {error}") from None
        require(isinstance(row, dict), f"{where}: expected an object, got {row!r:.60}")
        typed_as(kind, {field: row[field] for field in kind._fields if field in row}, where)
        found.append(row)
    return found


def _timeline(path: Path) -> tuple[int, ya.timeline.Timeline | None, ya.Program | None]:
    if not path.exists():
        return 0, None, None
    return _or_refused(path, lambda: _kept(strict_json.loads(_text(path))))


def _kept(data: Any) -> tuple[int, ya.timeline.Timeline, ya.Program]:
    if not isinstance(data, dict) or data.keys() != {"step", "timeline", "ops"} or type(data["step"]) is not int:
        raise ValueError("expected an object of a step, its timeline and the ops of its program")
    timeline = ya.timeline.Timeline.from_json(json.dumps(data["timeline"]))
    program = ya.Program.from_json(json.dumps(data["timeline"]["program"] | {"stages": [data["ops"]]}))
    ya.verify(program)
    return data["step"], timeline, program


def _machine(events: list[Row], path: Path) -> ya.planner.Cluster | None:
    found = [each for each in events if each["event"] == "machine"]
    if not found:
        return None
    figures = {key: value for key, value in found[-1].items() if key not in ("time", "event")}
    return _or_refused(path, lambda: ya.planner.Cluster(**figures))


def _or_refused(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not what a run leaves there: {error}") from None
