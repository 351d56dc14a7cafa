"""The results of benches: a plain dict, which `--json` prints, and tables of it, to read and to paste into a page.

heading(command, options)      where the figures come from
spread, ratios                 median, p10 and p90 of samples, round by round
hand_over(found, ...)          JSON, or tables
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.options import OfModel, Options
from train.machine import cpu, revision
from yafsdp_fn.util.disk import replace

LOSS_TOLERANCE = 1e-4
"""Relative difference of the last losses beyond which the contenders did not do the same work."""


class LossesDiffer(RuntimeError):
    """The contenders did not train the same model; their times are not comparable."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 (linear between the two nearest values)."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def check_losses(losses: Mapping[str, float]) -> None:
    """Refuses unless all contenders ended at one loss."""
    reference = next(iter(losses.values()))
    # Written so that a NaN anywhere refuses too.
    if not all(abs(loss - reference) <= LOSS_TOLERANCE * abs(reference) for loss in losses.values()):
        shown = ", ".join(f"{name} {loss:.7g}" for name, loss in losses.items())
        raise LossesDiffer(
            f"the losses of the last step differ by more than {LOSS_TOLERANCE:g} relative: {shown}. The contenders did "
            "not do the same work, so their times are not reported; find out which one is wrong first"
        )


def machine() -> dict[str, Any]:
    """The machine that the figures depend on."""
    out: dict[str, Any] = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        out["gpu"] = torch.cuda.get_device_name()
        out["gpus"] = torch.cuda.device_count()
        out["gpu_memory_bytes"] = properties.total_memory
        out["multiprocessors"] = properties.multi_processor_count
        out["driver, largest clock, power limit"] = driver()
    return out


def driver() -> str:
    """The GPU's driver, and how fast it may go."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def versions() -> dict[str, str | None]:
    """Versions of what is timed, down to the allocator's library."""
    out: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
    }
    for package in ("yafsdp_fn", "optree"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "run from a checkout"
    out["revision"] = revision("--dirty") or "unknown"
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    out["cuda"] = torch.version.cuda
    out["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None  # type: ignore[no-untyped-call]
    return out


def heading(command: str, options: Any) -> dict[str, Any]:
    """The beginning of every result. options: a dataclass"""
    given: dict[str, Any] = json.loads(json.dumps(vars(options), default=str))
    shape = {"shape": dataclasses.asdict(options.shape)} if isinstance(options, OfModel) else {}
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "options": given,
        **shape,
    }


WIDTH = 200
"""Columns of the console for the tables, whatever the terminal's: they are Markdown, which must not be cut short."""


Rows = dict[str, dict[str, str]]
"""Contender -> column -> cell."""


def mib(size: int) -> str:
    return f"{size / 2**20:,.{1 if size >= 10 << 20 else 2}f}"


def reached(value: float, target: float | None) -> str:
    """The goal, and whether `value` is at or below it."""
    return "" if target is None else f"{target:.2f} {'reached' if round(value, 3) <= target else 'MISSED'}"


def apart(over: Mapping[str, float], digits: int = 3) -> str:
    """The p10 and p90 of a spread."""
    return f"{over['p10']:.{digits}f} - {over['p90']:.{digits}f}"


def table(corner: str, rows: Rows) -> Table:
    """A table in Markdown, to paste into a page; print it on a console wide enough to leave every cell whole."""
    out = Table(box=box.MARKDOWN)
    out.add_column(corner, no_wrap=True)
    for column in next(iter(rows.values())):
        out.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        out.add_row(name, *cells.values())
    return out


def footer(found: dict[str, Any]) -> str:
    """Says where the figures come from."""
    versions = found["versions"]
    machine = found["machine"]
    gpus = f"{machine['gpus']} x {machine['gpu']}, " if "gpu" in machine else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{gpus}load {machine['load_average']:.1f}; torch {versions['torch']}, "
        f"python {versions['python']}, revision {versions['revision']}\n{found['command']}"
    )


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Replaces the file in one go: a reader finds one result or another, and never a part."""
    replace(path, (json.dumps(found, indent=1) + "\n").encode())


def hand_over(found: dict[str, Any], options: Options, parts: Iterable[str | Table]) -> None:
    """Writes the result to --save, and prints it: as JSON alone, or as sentences and tables, its `parts`."""
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        write(options.save, found)
    if options.json:
        print(json.dumps(found))
        return
    console = Console(width=WIDTH)
    for part in (*parts, footer(found)):
        if isinstance(part, Table):
            console.print(part)
        else:
            console.print(part, highlight=False, soft_wrap=True)
