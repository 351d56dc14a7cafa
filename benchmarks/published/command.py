"""The command: what to show, by its arguments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import errors, runs, yafsdp
from train.command_line import cli
from train.config import ConfigError, require


@dataclasses.dataclass(frozen=True)
class Options:
    """Predict published step times. By itself: YaFSDP's table."""

    rows: Path | None = None
    """Predict the runs of a CSV with the columns of published_runs.csv."""
    sources: bool = False
    """Predict the committed runs of other frameworks, each without a fit to its source."""
    json: bool = False
    """Print JSON, with --rows or --sources."""

    def __post_init__(self) -> None:
        rows = self.rows is not None
        require(not (rows and self.sources), "--rows, --sources: one of them")
        require(rows or self.sources or not self.json, "--json goes with --rows or --sources")


def main(argv: Sequence[str]) -> int:
    try:
        options = cli(Options, argv, prog="python -m benchmarks published")
        if options.rows is not None or options.sources:
            errors.show(options.rows or runs.TABLE, options.json, sources=options.sources)
        else:
            yafsdp.show()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
