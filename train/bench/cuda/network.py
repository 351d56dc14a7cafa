"""The published machine's network, scaled to this device, and the floor of a step on it.

    target   = communication / compute on the preset         of a step of the real widths, by the planner
    f        = target * compute here / communication on the preset of the step that runs here
    network  = the preset's, bandwidths / f and latencies * f
    floor    = max(compute, communication)                   no order of the same ops is faster

so that communication over compute is here what it is on the preset. Compute here is measured: a step on a network that
takes no time; the rest is the planner's (`analysis.work`). What the published runs had per unit that no op explains
(`peers.AS_RUN`) is left out on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch

import yafsdp_fn as ya
from models import llama
from yafsdp_fn.planner.analysis import Work, work
from yafsdp_fn.planner.cluster import A100, Cluster
from yafsdp_fn.planner.tasks import tasks
from yafsdp_fn.schedules import Trace


class Row(NamedTuple):
    """A published configuration: one sequence of `seq` tokens per GPU; the first `recomputed` layers run again.

    layers: of the whole model; ratio: YaFSDP's published step over FSDP's
    """

    model: str
    gpus: int
    seq: int
    layers: int
    recomputed: int
    ratio: float

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the two models that are timed: as large a part of them is recomputed as of the whole one."""
        return (8, 16) if self.recomputed else (4, 8)

    def at(self, depth: int) -> int:
        """Layers that recompute in a model of `depth` layers."""
        return round(self.recomputed * depth / self.layers)


@functools.cache
def published() -> dict[str, Row]:
    """The rows of docs/benchmarks/published_yafsdp.csv of 2048 tokens, by name."""
    from train.published.fit import rows

    found = {}
    for row in rows():
        if row.seq_len == 2048 and (row.model, row.gpus) != ("llama2-7b", 128):
            layers, ratio = llama.CONFIGS[row.model].layers, row.yafsdp_s / row.fsdp_s
            found[f"{row.model}/{row.gpus}"] = Row(row.model, row.gpus, row.seq_len, layers, row.ckpt_layers, ratio)
    return found


def target(row: Row, depth: int) -> float:
    """Communication over compute of so many layers of the real widths, on the preset."""
    real = dataclasses.replace(llama.CONFIGS[row.model], layers=depth)
    there = work_of(row, real, row.seq, A100)
    return there.comm_s / there.compute_s


def work_of(row: Row, config: llama.Config, seq: int, cluster: Cluster) -> Work:
    """Seconds of compute and of communication of `zero3` on the row's ranks, nothing waiting for anything."""
    program = ya.schedules.zero3(remat=ya.remat.first(row.at(config.layers)))(_traced(row.gpus, config, seq))
    return work(program, tasks(program, cluster), cluster)


@functools.cache
def _traced(ranks: int, config: llama.Config, seq: int) -> Trace:
    tokens = torch.empty((1, seq), dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens}
    precision = ya.Precision(compute=torch.bfloat16)
    tx = ya.optim.adamw(1e-4)
    return ya.trace(llama.loss(config), llama.params(config), batch, mesh=ranks, precision=precision, tx=tx)


def free(cluster: Cluster = A100) -> Cluster:
    """The same nodes, on a network that takes no time."""
    return dataclasses.replace(
        cluster,
        name=f"{cluster.name}, free network",
        node_bandwidth=math.inf,
        network_bandwidth=math.inf,
        node_latency=0.0,
        network_latency=0.0,
    )


def scaled(f: float, cluster: Cluster = A100) -> Cluster:
    """Nodes whose collectives take `f` times as long."""
    return dataclasses.replace(
        cluster,
        name=f"{cluster.name}, network x {f:.3g}",
        node_bandwidth=cluster.node_bandwidth / f,
        network_bandwidth=cluster.network_bandwidth / f,
        node_latency=cluster.node_latency * f,
        network_latency=cluster.network_latency * f,
    )


class Line(NamedTuple):
    """Seconds by number of layers, from two depths: what a layer adds, and what is there without layers."""

    per_layer: float
    rest: float

    @classmethod
    def through(cls, depths: tuple[int, int], seconds: tuple[float, float]) -> Line:
        slope = (seconds[1] - seconds[0]) / (depths[1] - depths[0])
        return cls(slope, seconds[0] - slope * depths[0])

    def at(self, layers: int) -> float:
        return self.rest + self.per_layer * layers
