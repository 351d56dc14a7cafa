"""`python -m train report RUN [RUN]`: reads folders, writes a page, says where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from train.config import ConfigError, require
from train.page.reading import kinds, read
from train.page.render import compared, single
from train.running.elastic import CANNOT_WORK
from train.running.run import newest


@dataclass(frozen=True)
class Options:
    """Writes one self-contained HTML page about a run, or about two beside each other."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """One run's folder, or two. None given: the newest of runs/."""
    out: Path | None = None
    """Where to write. None given: report.html in the first folder, or report-A-B.html of two."""
    cluster: str | None = None
    """Predict the recorded step on this cluster (`plan --help` has the names). None given: on the figures that the run
    measured of its machine, where it was started with --calibrate."""


def main(argv: Sequence[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="python -m train report")
    try:
        print(write(options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_WORK
    return 0


def write(options: Options) -> Path:
    """The page's path."""
    require(len(options.folders) <= 2, f"expected one folder or two, got {len(options.folders)}")
    folders = options.folders or (newest(Path("runs"), *kinds()),)
    runs = [read(folder) for folder in folders]
    name = "report.html" if len(runs) == 1 else f"report-{runs[0].name}-{runs[1].name}.html"
    path = options.out or folders[0] / name
    text = single(runs[0], options.cluster) if len(runs) == 1 else compared(runs[0], runs[1])
    require(len(runs) == 1 or options.cluster is None, "--cluster is for the page of one run")
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # half of a surrogate pair is JSON, no text
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; --out names another file") from None
    return path
