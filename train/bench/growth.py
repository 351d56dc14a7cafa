"""`python -m train bench growth`: what a step costs beyond its computations, as layers and ranks grow.

    for ranks in 1, 2, 3, 4:  for layers in 4, 8, 16, 32, 64:
        start the ranks; a step of ours and the pure computations (floor.py) in turn, in the same processes
        overhead per layer = (ours - pure) / layers

The layers are tiny, so that what Python does for a layer, forward and backward together, is a good part of the step.
Two clocks: the main thread's CPU time, which is Python and what it calls, and the time that passes, which is that and
the communication that the layers are too small to hide. On fewer cores than ranks, ranks share them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from train.bench import launch, names, report, tables
from train.bench.options import Bench, Shape

SHAPE = Shape(dim=64, ffn=128, heads=2, seq=16, batch=1)
GOALS_US = {"one rank": 100.0, "several": 250.0}
"""Of the main thread, per layer, forward and backward together."""

CLOCKS = {"main": "thread_seconds", "wall": "seconds"}


@dataclasses.dataclass(frozen=True)
class Growth:
    """Time steps of tiny layers beyond their pure computations, for growing numbers of layers and ranks."""

    layers: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Layers of the model."""
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Rank processes, with gloo."""
    schedule: str = "zero3"
    """Ours, as in `python -m train bench --schedules`."""
    steps: int = 20
    """Timed rounds for each number of layers and ranks."""
    warmup: int = 3
    """Rounds before that."""
    plot: Path | None = None
    """Where to draw the result: .png, .svg or .pdf."""
    json: bool = False
    """Print JSON alone on stdout instead of the table."""
    save: Path | None = None
    """Also write the JSON to this file."""
    timeout: float = 300.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        if len(set(self.layers)) < 2 or min(self.layers) < 1:
            raise ValueError(f"--layers {' '.join(map(str, self.layers))}: expected two different numbers or more")
        for ranks in self.ranks:
            names.check(self.schedule, ranks=ranks, layers=min(self.layers))
            self.bench(ranks)
        if self.plot is not None and self.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {self.plot}: expected a file that ends in .png, .svg or .pdf")

    def bench(self, ranks: int) -> Bench:
        return Bench(
            config="tiny",
            schedules=(self.schedule,),
            peers=("fsdp2",),
            ranks=ranks,
            steps=self.steps,
            warmup=self.warmup,
            timeout=self.timeout,
        )


def measure(growth: Growth, command: str, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed."""
    points: list[dict[str, Any]] = []
    for ranks in growth.ranks:
        for layers in growth.layers:
            with console.status(f"timing {layers} layers on {ranks} rank(s)"):
                shape = dataclasses.replace(SHAPE, layers=layers)
                found = launch.run("growth", (growth.schedule,), growth.bench(ranks), shape)
            points.append({"ranks": ranks, "layers": layers, **point(found, growth.schedule, layers)})
    result = {
        **report.heading(command),
        "schedule": growth.schedule,
        "shape": {key: value for key, value in dataclasses.asdict(SHAPE).items() if key != "layers"},
        "steps": growth.steps,
        "goals_us": GOALS_US,
        "points": points,
        "lines": [{"ranks": ranks, **line([p for p in points if p["ranks"] == ranks])} for ranks in growth.ranks],
    }
    if growth.plot is not None:
        from train.bench import growth_plot

        growth_plot.save(result, growth.plot)
    return result


def point(found: dict[str, Any], name: str, layers: int) -> dict[str, Any]:
    """Microseconds per layer beyond pure computation, and those of the whole steps."""
    out: dict[str, Any] = {}
    for clock, field in CLOCKS.items():
        ours, pure = found[field][name], found[field]["pure"]
        out[f"{clock}_us_per_layer"] = report.spread([1e6 * (a - b) / layers for a, b in zip(ours, pure, strict=True)])
        out[f"{clock}_step_us"] = 1e6 * statistics.median(ours)
        out[f"{clock}_pure_us"] = 1e6 * statistics.median(pure)
    return out


def goal_us(ranks: int) -> float:
    return GOALS_US["one rank" if ranks == 1 else "several"]


def line(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The straight line through the main thread's overheads of whole steps: what a further layer costs, and what a
    step costs before its first one."""
    layers = [float(p["layers"]) for p in points]
    total = [p["main_us_per_layer"]["median"] * p["layers"] for p in points]
    slope, fixed = statistics.linear_regression(layers, total)
    return {"main_us_per_further_layer": slope, "main_us_per_step": fixed}


def show(found: dict[str, Any], console: Console) -> None:
    """A row for each number of ranks and layers."""
    cores = found["machine"]["cores"]
    rows: tables.Rows = {}
    for p in found["points"]:
        main, wall = p["main_us_per_layer"], p["wall_us_per_layer"]
        rows[f"{p['ranks']} x {p['layers']}{' *' if p['ranks'] > cores else ''}"] = {
            "main thread, us per layer": f"{main['median']:.0f}",
            "p10 - p90": f"{main['p10']:.0f} - {main['p90']:.0f}",
            "goal": tables.reached(main["median"], goal_us(p["ranks"])),
            "elapsed, us per layer": f"{wall['median']:.0f}",
            "p10 - p90 ": f"{wall['p10']:.0f} - {wall['p90']:.0f}",
            "step ms": f"{p['wall_step_us'] / 1e3:.2f}",
            "pure ms": f"{p['wall_pure_us'] / 1e3:.2f}",
        }
    shape = found["shape"]
    console.print(
        f"{found['schedule']} beyond pure computation, forward and backward: dim {shape['dim']}, seq {shape['seq']}, "
        f"{found['steps']} interleaved steps, medians. Main thread: CPU time, without communication; elapsed: with it"
        + (f"; *: more ranks than the {cores} cores" if any(p["ranks"] > cores for p in found["points"]) else ""),
        highlight=False,
        soft_wrap=True,
    )
    console.print(tables.table("ranks x layers", rows))
    for each in found["lines"]:
        console.print(
            f"{each['ranks']} rank(s): a further layer costs the main thread {each['main_us_per_further_layer']:.0f} "
            f"us, a step {each['main_us_per_step']:.0f} us before its first",
            highlight=False,
            soft_wrap=True,
        )
    tables.footer(found, console)
