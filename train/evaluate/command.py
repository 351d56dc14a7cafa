"""The command: options in, tables or JSON out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from train.config import ConfigError, counts, require
from train.evaluate import choices, harness, perplexity
from train.running.report import Terminal
from train.trained.loaded import Loaded, Source, load
from yafsdp_fn import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure a model of `python -m train clm`, or of a Hugging Face directory."""

    source: tyro.conf.OmitArgPrefixes[Source] = dataclasses.field(default_factory=Source)
    text: tuple[str, ...] = ()
    """Text files or globs: perplexity, per token and per byte."""
    choices: tuple[Path, ...] = ()
    """Files of multiple choice: {"question", "choices", "answer"} a line."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, which must be installed."""
    limit: int | None = None
    """Only the first so many questions of a file, or examples of a task."""
    batch: int = 8
    """Texts that are computed at once."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        counts(self, batch=1)
        if self.limit is not None:
            counts(self, limit=1)
        require(bool(self.text or self.choices or self.tasks), "nothing to measure: give --text, --choices or --tasks")


def main(argv: Sequence[str]) -> int:
    try:
        config = tyro.cli(Config, args=argv, prog="python -m train eval")
        texts, questions = perplexity.read(config.text), {file: choices.read(file) for file in config.choices}
        manager = harness.known(config.tasks) if config.tasks else None
        show(config, measured(config, load(config.source), texts, questions, manager))
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def measured(
    config: Config,
    loaded: Loaded,
    texts: dict[str, str],
    questions: dict[Path, list[choices.Question]],
    manager: Any = None,
) -> dict[str, Any]:
    """What `--json` prints. On all ranks together. manager: of `--tasks`"""
    found: dict[str, Any] = {"model": loaded.named}
    if texts:
        found["text"] = {
            each.name: {
                "tokens": each.tokens,
                "bytes": each.nbytes,
                "perplexity_per_token": each.per_token,
                "perplexity_per_byte": each.per_byte,
                "bits_per_byte": each.bits_per_byte,
            }
            for each in perplexity.perplexities(loaded, texts, config.batch)
        }
    for file, of_file in questions.items():
        scores = choices.accuracy(loaded, of_file[: config.limit], config.batch)
        found.setdefault("choices", {})[str(file)] = {
            "questions": scores.questions,
            "accuracy": scores.plain,
            "accuracy_error": scores.error(scores.plain),
            "accuracy_per_byte": scores.normalised,
            "accuracy_per_byte_error": scores.error(scores.normalised),
        }
    if config.tasks:
        found["tasks"] = harness.results(loaded, config.tasks, config.limit, config.batch, manager)
    return found


def show(config: Config, found: dict[str, Any]) -> None:
    """Rank 0 writes."""
    console = Terminal(quiet=dist.get_rank() != 0)
    if config.json:
        console.out(json.dumps(found, indent=2, default=str), highlight=False)
        return
    console.print(Text(found["model"]), soft_wrap=True)
    if "text" in found:
        rows = [
            (name, f"{x['tokens']:,}", f"{x['bytes']:,}", *(f"{x[key]:.3f}" for key in PERPLEXITY))
            for name, x in found["text"].items()
        ]
        console.print(_table(("text", "tokens", "bytes", "perplexity a token", "a byte", "bits a byte"), rows))
    if "choices" in found:
        rows = [
            (name, f"{x['questions']:,}", *(f"{x[key]:.3f} ± {x[f'{key}_error']:.3f}" for key in ACCURACY))
            for name, x in found["choices"].items()
        ]
        console.print(_table(("multiple choice", "questions", "accuracy", "by likelihood a byte"), rows))
    if "tasks" in found:
        rows = [
            (task, name.partition(",")[0], f"{value:.4f}")
            for task, of_task in found["tasks"].items()
            for name, value in of_task.items()
            if isinstance(value, float)
        ]
        console.print(_table(("task", "metric", "value"), rows))


PERPLEXITY = ("perplexity_per_token", "perplexity_per_byte", "bits_per_byte")
ACCURACY = ("accuracy", "accuracy_per_byte")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
