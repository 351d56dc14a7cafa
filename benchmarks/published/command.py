"""The command: what to show, by its arguments.

By itself, each row of YaFSDP's table predicted from the others. --better, seconds of a step, row by row:

    yafsdp        the published one, as simulated: what the others are to be compared with
    zero3         this project's, as many layers recomputed
    search        the fastest under the memory of the cluster's preset: builder, mesh, residence, recomputed layers
    bf16          the same with gradients reduced in bf16
    8 bits        what search finds for bf16, with half the bytes in gathers and reductions; casts are not counted

All of them with the overhead that the published runs had (`peers.AS_RUN`), so that schedules alone differ. Nobody has
measured any of these. What narrower numbers do to training is another question.

--variants: each line changes the model and fits it again, to all rows: where the error stays as it was, the times do
not tell.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import yafsdp_fn as ya
from benchmarks.published import errors, foundry_fit, over_axes, runs
from benchmarks.published.fit import (
    A100,
    PRECISION,
    START,
    Figures,
    Row,
    fit,
    left_out,
    predict,
    roofline,
    rows,
    simulated,
    spread,
    summary,
    traced,
    yafsdp_s,
)
from train.command_line import cli
from train.config import ConfigError, require
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Cluster, Found, search, simulate
from yafsdp_fn.schedules import Trace


@dataclasses.dataclass(frozen=True)
class Options:
    """Predict published step times. By itself: each row of YaFSDP's table, predicted from the others."""

    better: bool = False
    """Show what the planner expects to beat the published schedule."""
    variants: bool = False
    """Show what the times of YaFSDP do not tell."""
    rows: Path | None = None
    """Predict the runs of a CSV with the columns of LLM Foundry's table, or of published_runs.csv."""
    fit: bool = False
    """Fit the figures of --rows to the committed runs, and predict each without itself and without its model."""
    register: bool = False
    """Predict the same runs on 16 to 512 GPUs, as a CSV."""
    axes: bool = False
    """Predict published runs with tensor, context and pipeline parallelism."""
    sources: bool = False
    """Predict the committed runs of other frameworks, each without a fit to its source."""
    json: bool = False
    """Print JSON, with --rows, --fit, --axes or --sources."""

    def __post_init__(self) -> None:
        given = [
            name for name in ("better", "variants", "rows", "fit", "register", "axes", "sources") if getattr(self, name)
        ]
        require(len(given) < 2, f"{', '.join(f'--{name}' for name in given)}: one of them")
        require(
            not self.json or given in (["rows"], ["fit"], ["axes"], ["sources"]),
            "--json goes with --rows, --fit, --axes or --sources",
        )


def main(argv: Sequence[str]) -> int:
    try:
        options = cli(Options, argv, prog="python -m benchmarks published")
        if options.rows is not None:
            errors.show(options.rows, options.json)
        elif options.fit:
            foundry_fit.show_fit(options.json)
        elif options.axes:
            over_axes.show(options.json)
        elif options.sources:
            errors.show(runs.TABLE, options.json, sources=True)
        elif options.better:
            show_better()
        elif options.variants:
            show_variants()
        elif options.register:
            foundry_fit.show_registered()
        else:
            show()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show() -> None:
    """Each row predicted from the others, the errors, and the figures."""
    table = rows()
    found = left_out(table)
    print(f"{'':<46} {'YaFSDP, s':>16} {'FSDP, s':>17} {'speedup, %':>14}")
    print(f"{'left out':<46} {'measured  model':>16} {'measured  model':>17} {'meas.  model':>14}")
    for row, ours, theirs in found:
        speedups = f"{100 * row.speedup:7.1f} {100 * (1 - ours / theirs):6.1f}"
        print(f"{row!s:<46} {row.yafsdp_s:8.2f} {ours:7.2f} {row.fsdp_s:9.2f} {theirs:7.2f} {speedups}")
    print(f"\n{'error: median, largest':<46} {'YaFSDP, %':>16} {'FSDP, %':>17} {'speedup, pt':>14}")
    models = {"simulation": found, "simulation, whole models left out": left_out(table, alike=lambda row: row.model)}
    models["roofline, larger of two"] = left_out(table, roofline(max))
    models["roofline, sum of two"] = left_out(table, roofline(lambda a, b: a + b))
    for name, predictions in models.items():
        cells = [f"{median:.2f}, {largest:.2f}" for median, largest in summary(predictions)]
        print(f"{name:<46} {cells[0]:>16} {cells[1]:>17} {cells[2]:>14}")
    figures = simulated(table)
    growth = figures.pop("growth")
    errors, correlations = spread(yafsdp_s, {row: row.yafsdp_s for row in table}, figures)
    print("\nfitted to all rows, with relative standard errors and correlations")
    for name, error, line in zip(figures, errors, correlations, strict=True):
        print(f"  {name:<20} {figures[name]:<10.4g} {error:>5.0%}   {' '.join(f'{r:5.2f}' for r in line)}")
    print(f"  {'growth':<20} {growth:<10.4g}")


BF16 = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


def found_for(row: Row, precision: ya.Precision = PRECISION) -> Found:
    """The search's result for a row."""
    return search(traced(row, precision), peers.AS_RUN, runners_up=0)


def with_half_the_bytes(trace: Trace) -> Trace:
    """The step with units half as wide on the wire."""
    halved = [u._replace(gather_bytes=u.gather_bytes // 2, reduce_bytes=u.reduce_bytes // 2) for u in trace.units]
    return trace._replace(units=tuple(halved))


def better(row: Row) -> tuple[dict[str, float], Found]:
    """Seconds by name, and what search found for bf16."""
    remat = ya.schedules.remat.first(row.ckpt_layers)
    plain, bf16 = found_for(row), found_for(row, BF16)
    narrow = bf16.best.point.schedule()(with_half_the_bytes(bf16.program.trace))
    seconds = {
        "yafsdp": predict(row, peers.yafsdp(remat=remat)),
        "zero3": predict(row, ya.schedules.zero3(remat=remat)),
        "search": plain.best.step_s,
        "bf16": bf16.best.step_s,
        "8 bits": simulate(narrow, peers.AS_RUN).seconds,
    }
    return seconds, bf16


def show_better() -> None:
    """Prints a line per row."""
    print("predictions in seconds per step; nothing here was measured but the first column")
    names = ("measured", "yafsdp", "zero3", "search", "bf16", "8 bits")
    print(f"{'':<46} {' '.join(f'{name:>8}' for name in names)}  found for bf16")
    for row in rows():
        seconds, bf16 = better(row)
        cells = " ".join(f"{value:8.2f}" for value in (row.yafsdp_s, *seconds.values()))
        print(f"{row!s:<46} {cells}  {bf16.best.point}", flush=True)


def whole_ring(cluster: Cluster, row: Row) -> Cluster:
    """`network_latency` is that of a whole ring, however many nodes it has."""
    return cluster.replace(network_latency=cluster.network_latency / (row.gpus // cluster.gpus_per_node - 1))


def sized(power: float, cluster: Cluster, row: Row) -> Cluster:
    """`unit_overhead` is that of 1e8 elements, and grows with a power of a unit's elements."""
    sizes = [(unit.numel / 1e8) ** power for unit in traced(row).units]
    return cluster.replace(unit_overhead=cluster.unit_overhead * float(np.mean(sizes)))


def doubled(cluster: Cluster, row: Row) -> Cluster:
    """`unit_overhead` is that of two GPUs, and comes again each time that GPUs double."""
    return cluster.replace(unit_overhead=cluster.unit_overhead * math.log2(row.gpus))


def unchanged(cluster: Cluster, row: Row) -> Cluster:
    return cluster


def refit(
    precision: ya.Precision = PRECISION,
    start: Figures = START,
    change: Callable[[Cluster, Row], Cluster] = unchanged,
    **fixed: float,
) -> tuple[float, dict[str, float]]:
    """Root mean square of the logarithms of YaFSDP's seconds, predicted over measured, and the fitted figures.

    start: what is fitted, and from where; fixed: figures of the cluster that are not
    """
    programs = {
        row: peers.yafsdp(remat=ya.schedules.remat.first(row.ckpt_layers))(traced(row, precision)) for row in rows()
    }

    def seconds(row: Row, figures: Figures) -> float:
        return simulate(programs[row], change(A100.replace(**fixed, **figures), row)).seconds

    found = fit(seconds, {row: row.yafsdp_s for row in programs}, start)
    errors = [math.log(seconds(row, found) / row.yafsdp_s) for row in programs]
    return float(np.sqrt(np.mean(np.square(errors)))), found


FREE = START | {"contention": 0.1}
NO_OVERHEAD = {name: value for name, value in START.items() if name != "unit_overhead"}
MEMORY = A100.memory_bandwidth

VARIANTS: dict[str, Callable[[], tuple[float, dict[str, float]]]] = {
    "nothing": refit,
    "attention at 120 TFLOP/s, contention free": partial(refit, start=FREE, attention_flops=120e12),
    "attention at 150 TFLOP/s, contention free": partial(refit, start=FREE, attention_flops=150e12),
    "attention at 210 TFLOP/s, contention free": partial(refit, start=FREE, attention_flops=210e12),
    "contention 0": partial(refit, contention=0.0),
    "contention 0.2": partial(refit, contention=0.2),
    "contention 0.4": partial(refit, contention=0.4),
    "reductions in bf16": partial(refit, BF16),
    "half as many bytes through memory": partial(refit, memory_bandwidth=2 * MEMORY),
    "twice as many bytes through memory": partial(refit, memory_bandwidth=MEMORY / 2),
    "no hops inside nodes": partial(refit, node_latency=0.0),
    "latency the same for any number of nodes": partial(
        refit, start=START | {"network_latency": 1e-3}, change=whole_ring, node_latency=0.0
    ),
    "overhead per unit and root of its elements": partial(refit, change=partial(sized, 1 / 2)),
    "overhead per unit and fourth root of them": partial(refit, change=partial(sized, 1 / 4)),
    "overhead per unit and log2 of the GPUs": partial(refit, start=START | {"unit_overhead": 1e-3}, change=doubled),
    "overhead per step": partial(refit, start=NO_OVERHEAD | {"step_overhead": 0.1}),
    "nothing through memory": partial(refit, memory_bandwidth=math.inf),
    "no overhead": partial(refit, start=NO_OVERHEAD),
}


def show_variants() -> None:
    """Prints a line per variant."""
    print(f"{'changed':<42} {'rms, %':>7}  fitted")
    for words, again in VARIANTS.items():
        rms, found = again()
        figures = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        print(f"{words:<42} {100 * rms:7.2f}  {figures}", flush=True)
