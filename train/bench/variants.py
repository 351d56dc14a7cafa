"""Training in several ways, in turn, with one schedule: step times, memory and messages over those of the first way.

A section names its ways and builds them: lora.py, optimizers.py. Messages are of the program; memory is the largest sum
of live tensors, measured, beside what the planner says.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

import yafsdp_fn as ya
from train.bench import launch, report, tables
from train.bench.contenders import Ours
from train.bench.options import Bench, Kind

GOAL = 0.03
"""Of the planner's memory, beside what is measured."""


@dataclasses.dataclass(frozen=True)
class Variants:
    """The options of a section."""

    config: Literal["A", "B", "C", "tiny"] = "A"
    """The model, as in `python -m train bench`."""
    schedule: str = "zero3"
    """Ours, as in `python -m train bench --schedules`."""
    batch: int = 0
    """Sequences per rank; 0: the config's."""
    steps: int = 20
    """Timed rounds."""
    warmup: int = 3
    """Rounds before that."""
    json: bool = False
    """Print JSON alone on stdout instead of the table."""
    save: Path | None = None
    """Also write the JSON to this file."""
    timeout: float = 900.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        self.bench(2)

    def bench(self, ranks: int) -> Bench:
        return Bench(
            config=self.config,
            schedules=(self.schedule,),
            peers=("ddp",),  # not built: a `Bench` wants two
            batch=self.batch,
            ranks=ranks,
            steps=self.steps,
            warmup=self.warmup,
            timeout=self.timeout,
        )


def planned(contender: Ours, batch: Any) -> dict[str, int]:
    """Bytes that a rank holds at most and that it sends in a step, of a contender that has taken no step."""
    program = contender.train_step.lower(contender.state, batch)
    peak = ya.memory(program, device=contender.state.memory.comms.device.type).peak_bytes
    return {"planned_bytes": peak, "wire_bytes": sum(program.wire_bytes().values())}


def measure(kind: Kind, options: Variants, ranks: int, names: Sequence[str], console: Console) -> dict[str, Any]:
    """`{name: row}` on so many ranks. Raises RankFailed."""
    with console.status(f"timing {', '.join(names)} in turn on {ranks} rank(s)"):
        found = launch.run(kind, (options.schedule,), options.bench(ranks))
    return {name: _row(name, names[0], found["seconds"], found["bytes"]) for name in names}


def _row(
    name: str, first: str, seconds: Mapping[str, list[float]], nbytes: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """One way, and over the first."""
    own, base = nbytes[name], nbytes[first]
    return {
        "step_ms": 1e3 * statistics.median(seconds[name]),
        "over_first": report.ratios(seconds[name], seconds[first]),
        "adds_ms": report.spread([1e3 * (a - b) for a, b in zip(seconds[name], seconds[first], strict=True)]),
        **own,
        "wire_over_first": own["wire_bytes"] / base["wire_bytes"] if base["wire_bytes"] else None,
        "peak_over_first": own["peak_bytes"] / base["peak_bytes"],
        "planned_over_peak": own["planned_bytes"] / own["peak_bytes"],
    }


def show(title: str, found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """A row for each way."""
    rows: tables.Rows = {}
    for name, each in found.items():
        over, off, wire = each["over_first"], each["planned_over_peak"] - 1, each["wire_over_first"]
        rows[name] = {
            "step ms": f"{each['step_ms']:.1f}",
            "ratio": f"{over['median']:.3f}",
            "p10 - p90": f"{over['p10']:.3f} - {over['p90']:.3f}",
            "sent MiB": tables.mib(each["wire_bytes"]),
            "ratio ": "" if wire is None else f"{wire:.3f}",
            "memory MiB": tables.mib(each["peak_bytes"]),
            "ratio  ": f"{each['peak_over_first']:.3f}",
            "planned MiB": tables.mib(each["planned_bytes"]),
            "off": f"{off:+.1%}{'' if abs(off) <= GOAL else ' MISSED'}",
        }
    console.print(tables.table(title, rows))
