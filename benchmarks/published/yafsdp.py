"""YaFSDP's published table: seconds of its steps and of FSDP's, and what the planner predicts of them.

The cluster is `peers.AS_RUN`, whose three figures, and `growth` of `peers.fsdp`, were fitted to these rows: with all of
them, and without each (docs/benchmarks/published_yafsdp_fit.json).
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np
import torch

import yafsdp_fn as ya
from models import llama
from train.machine import ROOT
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import simulate, trace
from yafsdp_fn.schedules import Schedule, Trace

TABLE = ROOT / "docs" / "benchmarks" / "published_yafsdp.csv"


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
def traced(row: Row) -> Trace:
    """The step of `row`, of this project's Llama; every rank holds a shard. Gathers in bf16, reductions in fp32."""
    config = llama.CONFIGS[row.model]
    tokens = torch.empty((1, row.seq_len), dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens}
    return trace(
        llama.loss(config),
        llama.params(config),
        batch,
        ranks=row.gpus,
        precision=ya.Precision(compute=torch.bfloat16),
        tx=ya.optim.adamw(1e-4),
    )


def predict(row: Row, schedule: Schedule) -> float:
    """Seconds per step of `row` with a schedule, on the preset as the published runs had it."""
    return simulate(schedule(traced(row)), peers.AS_RUN).seconds


class Predicted(NamedTuple):
    """A prediction of a row."""

    row: Row
    yafsdp_s: float
    fsdp_s: float

    @property
    def errors(self) -> tuple[float, float, float]:
        """The errors in percent: of YaFSDP's and FSDP's seconds; of the speedup, in percentage points."""
        row = self.row
        ours = self.yafsdp_s / row.yafsdp_s - 1
        theirs = self.fsdp_s / row.fsdp_s - 1
        return 100 * ours, 100 * theirs, 100 * (1 - self.yafsdp_s / self.fsdp_s - row.speedup)


def predicted(row: Row) -> Predicted:
    remat = ya.schedules.remat.first(row.ckpt_layers)
    return Predicted(row, predict(row, peers.yafsdp(remat=remat)), predict(row, peers.fsdp(remat=remat)))


def summary(predictions: list[Predicted]) -> list[tuple[float, float]]:
    """(median, largest) absolute error of YaFSDP's seconds, FSDP's seconds, and the speedup."""
    columns = zip(*(p.errors for p in predictions), strict=True)
    return [(float(np.median(np.abs(c))), float(np.abs(c).max())) for c in columns]


def show() -> None:
    """Prints a line for each row, and the errors."""
    found = [predicted(row) for row in rows()]
    cells = [f"{median:.2f}, {largest:.2f}" for median, largest in summary(found)]
    print(f"{'':<46} {'YaFSDP, s':>16} {'FSDP, s':>17} {'speedup, %':>14}")
    print(f"{'':<46} {'measured  model':>16} {'measured  model':>17} {'meas.  model':>14}")
    for row, ours, theirs in found:
        seconds = f"{row.yafsdp_s:8.2f} {ours:7.2f} {row.fsdp_s:9.2f} {theirs:7.2f}"
        speedups = f"{100 * row.speedup:7.1f} {100 * (1 - ours / theirs):6.1f}"
        print(f"{row!s:<46} {seconds} {speedups}")
    print(f"{'error, % and points: median, largest':<46} {cells[0]:>16} {cells[1]:>17} {cells[2]:>14}")
