"""`python -m train published --variants`: what the published times do not tell, and what they do.

Each line changes the model and fits it again, to all rows: where the error stays as it was, the times do not tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

import yafsdp_fn as ya
from train.published.better import BF16
from train.published.fit import PRECISION, START, Figures, Row, fit, rows, traced
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Cluster, simulate
from yafsdp_fn.planner.cluster import A100


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
    programs = {row: peers.yafsdp(remat=ya.remat.first(row.ckpt_layers))(traced(row, precision)) for row in rows()}

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


def show() -> None:
    """Prints a line per variant."""
    print(f"{'changed':<42} {'rms, %':>7}  fitted")
    for words, again in VARIANTS.items():
        rms, found = again()
        figures = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        print(f"{words:<42} {100 * rms:7.2f}  {figures}", flush=True)
