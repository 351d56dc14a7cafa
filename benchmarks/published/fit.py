"""The published table, the models of its times, and the fit of their figures.

    figures of the cluster     three, fitted to YaFSDP's seconds by damped Gauss-Newton on logarithms
    growth of FSDP's copies    one, fitted to FSDP's seconds on that cluster
    leave one out              fitted without a row, for each row; beside it a roofline of two terms, fitted alike

The model's form is that of `yafsdp_fn.planner`: no figure knows which row it is used for.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

import yafsdp_fn as ya
from models import llama
from train.machine import ROOT
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, simulate, trace
from yafsdp_fn.schedules import Program, Schedule, Trace

TABLE = ROOT / "docs" / "benchmarks" / "published_yafsdp.csv"
A100 = CLUSTERS["a100-80g"]
PRECISION = ya.Precision(compute=torch.bfloat16)
"""Gathers in bf16, reductions in fp32."""


class Row(NamedTuple):
    """A measurement: seconds per step, one sequence of `seq_len` per GPU, `ckpt_layers` layers recomputed."""

    model: str
    gpus: int
    seq_len: int
    ckpt_layers: int
    yafsdp_s: float
    fsdp_s: float

    @property
    def speedup(self) -> float:
        """The part of FSDP's time that YaFSDP saves."""
        return 1 - self.yafsdp_s / self.fsdp_s

    def __str__(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, {self.seq_len}, {self.ckpt_layers} recomputed"


def rows(table: Path = TABLE) -> list[Row]:
    """The rows of the table."""
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    kinds = get_type_hints(Row)
    return [Row(**{name: kinds[name](row[name]) for name in Row._fields}) for row in csv.DictReader(lines)]


@functools.cache
def traced(row: Row, precision: ya.Precision = PRECISION) -> Trace:
    """The step of `row`, of this project's Llama; every rank holds a shard."""
    config = llama.CONFIGS[row.model]
    tokens = torch.empty((1, row.seq_len), dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens}
    tx = ya.optim.adamw(1e-4)
    return trace(llama.loss(config), llama.params(config), batch, ranks=row.gpus, precision=precision, tx=tx)


def predict(row: Row, schedule: Schedule) -> float:
    """Seconds per step of `row` with a schedule, on the preset as the published runs had it."""
    return simulate(schedule(traced(row)), peers.AS_RUN).seconds


Figures = Mapping[str, float]
"""The figures that are fitted, by name: those of `Cluster`, and `growth` of `peers.fsdp`."""

START: dict[str, float] = {
    "matmul_flops": 240e12,
    "network_bandwidth": 90e9,
    "unit_overhead": 5e-3,
}
GROWTH = {"growth": 40.0}

Model = Callable[[Row, Figures], float]
Vector = NDArray[np.float64]


def fit(model: Model, seconds: Mapping[Row, float], start: Figures) -> dict[str, float]:
    """The positive figures that minimise the squared logarithms of predicted over measured seconds."""
    names = list(start)
    residuals = _residuals(model, seconds, names)
    x, damping = np.log([start[name] for name in names]), 1e-2
    now = residuals(x)
    for _ in range(8):
        slopes, before = _slopes(residuals, x, now), now @ now
        for _ in range(4):
            normal, gradient = slopes.T @ slopes, slopes.T @ now
            change = -np.linalg.solve(normal + damping * np.diag(normal.diagonal() + 1e-9), gradient).clip(-1, 1)
            then = residuals(x + change)
            if then @ then < now @ now:  # Broyden: slopes that explain this step too
                slopes += np.outer(then - now - slopes @ change, change) / (change @ change)
                x, now, damping = x + change, then, damping / 5
            else:
                damping *= 6
        if before - now @ now < 1e-3 * before:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def _residuals(model: Model, seconds: Mapping[Row, float], names: Sequence[str]) -> Callable[[Vector], Vector]:
    """Returns the function from logarithms of figures to those of predicted over measured seconds."""

    def residuals(x: Vector) -> Vector:
        figures = dict(zip(names, np.exp(x).tolist(), strict=True))
        return np.array([math.log(model(row, figures) / measured) for row, measured in seconds.items()])

    return residuals


def _slopes(function: Callable[[Vector], Vector], x: Vector, now: Vector, step: float = 1e-3) -> Vector:
    return np.stack([(function(x + step * axis) - now) / step for axis in np.eye(len(x))], axis=1)


def spread(model: Model, seconds: Mapping[Row, float], figures: Figures) -> tuple[Vector, Vector]:
    """Standard errors, relative, of fitted figures, and the correlations among them."""
    x = np.log(list(figures.values()))
    residuals = _residuals(model, seconds, list(figures))
    now = residuals(x)
    slopes = _slopes(residuals, x, now)
    covariance = np.linalg.inv(slopes.T @ slopes) * (now @ now) / (len(now) - len(x))
    errors = np.sqrt(covariance.diagonal())
    return errors, covariance / np.outer(errors, errors)


@functools.cache
def _yafsdp(row: Row) -> Program:
    return peers.yafsdp(remat=ya.schedules.remat.first(row.ckpt_layers))(traced(row))


def yafsdp_s(row: Row, figures: Figures) -> float:
    """Seconds of YaFSDP on the cluster with these figures."""
    return simulate(_yafsdp(row), A100.replace(**figures)).seconds


def fsdp_s(row: Row, figures: Figures) -> float:
    """Seconds of FSDP; figures: the cluster's and `growth`."""
    cluster = {name: value for name, value in figures.items() if name != "growth"}
    schedule = peers.fsdp(remat=ya.schedules.remat.first(row.ckpt_layers), growth=figures["growth"])
    return simulate(schedule(traced(row)), A100.replace(**cluster)).seconds


def simulated(table: list[Row]) -> dict[str, float]:
    """The figures that fit the rows of `table`: the cluster's from YaFSDP's seconds, then FSDP's growth."""
    cluster = fit(yafsdp_s, {row: row.yafsdp_s for row in table}, START)
    growth = fit(lambda row, it: fsdp_s(row, cluster | dict(it)), {row: row.fsdp_s for row in table}, GROWTH)
    return cluster | growth


class Predicted(NamedTuple):
    """A model's prediction of a row that it was fitted without."""

    row: Row
    yafsdp_s: float
    fsdp_s: float

    @property
    def errors(self) -> tuple[float, float, float]:
        """The errors in percent: of YaFSDP's and FSDP's seconds; of the speedup, in percentage points."""
        row = self.row
        ours, theirs = self.yafsdp_s / row.yafsdp_s - 1, self.fsdp_s / row.fsdp_s - 1
        return 100 * ours, 100 * theirs, 100 * (1 - self.yafsdp_s / self.fsdp_s - row.speedup)


Predictor = Callable[[Row], tuple[float, float]]
"""Predicts seconds of YaFSDP and of FSDP, by a model that was fitted."""


def simulation(table: list[Row]) -> Predictor:
    """The simulation, fitted to the rows of `table`."""
    figures = simulated(table)
    cluster = {name: value for name, value in figures.items() if name != "growth"}
    return lambda row: (yafsdp_s(row, cluster), fsdp_s(row, figures))


def left_out(
    table: list[Row],
    fitted: Callable[[list[Row]], Predictor] = simulation,
    alike: Callable[[Row], object] = lambda row: row,
) -> list[Predicted]:
    """Each row as it is predicted without the rows that are `alike`: itself alone by default. fitted: fits a model"""
    without = {key: fitted([row for row in table if alike(row) != key]) for key in dict.fromkeys(map(alike, table))}
    return [Predicted(row, *without[alike(row)](row)) for row in table]


ROOFLINE = {"flops": 200e12, "bytes": 90e9}
"""Starting point of the fit of a roofline: rates per second."""


@functools.cache
def _flops_and_bytes(row: Row) -> tuple[int, int]:
    """FLOPs of all computes of a step, and bytes that a rank sends."""
    program = _yafsdp(row)
    visits, recomputed = program.trace.visits, ya.schedules.remat.first(row.ckpt_layers)(program.trace)
    flops = sum(v.cost.bwd_flops + v.cost.bwd_attention_flops for v in visits)
    flops += sum((v.cost.flops + v.cost.attention_flops) * (1 + (v.id in recomputed)) for v in visits)
    return flops, sum(program.wire_bytes().values())


def roofline(combine: Callable[[float, float], float]) -> Callable[[list[Row]], Predictor]:
    """Fits two terms to each of YaFSDP and FSDP: all FLOPs, and all bytes that a rank sends, each over its rate.

    combine: `max` of the terms, or their sum
    """

    def model(row: Row, figures: Figures) -> float:
        flops, nbytes = _flops_and_bytes(row)
        return combine(flops / figures["flops"], nbytes / figures["bytes"])

    def fitted(table: list[Row]) -> Predictor:
        ours = fit(model, {row: row.yafsdp_s for row in table}, ROOFLINE)
        theirs = fit(model, {row: row.fsdp_s for row in table}, ROOFLINE)
        return lambda row: (model(row, ours), model(row, theirs))

    return fitted


def summary(predictions: list[Predicted]) -> list[tuple[float, float]]:
    """(median, largest) absolute error of YaFSDP's seconds, FSDP's seconds, and the speedup."""
    columns = zip(*(p.errors for p in predictions), strict=True)
    return [(float(np.median(np.abs(c))), float(np.abs(c).max())) for c in columns]
