"""Published runs of LLM Foundry: rows of a file, the step of each, and what the simulation says of it.

    step(row)              MPT, torch's FSDP (`peers.fsdp`), layers recomputed or not, in micro-batches
    seconds(row, figures)  a + (accumulation - 1) b, from simulations of one and of two micro-batches
    figures                three of a kind of GPU: rates of products, of attention, and of all else through memory

Set, not fitted: links (`KINDS`), bytes per element that collectives move (`TRAFFIC`), and what fp8 is (`FP8_RATE`).
Gathers and reductions are in bf16 in all rows, as Composer's "PURE" has them, and as its "DEFAULT" had while these runs
were made (no dtype for reductions, so that torch takes that of the parameters); every micro-batch reduces.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from models import gpt2
from train.machine import ROOT
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, Cluster, Memory, predict_memory, simulate, trace
from yafsdp_fn.planner.cluster import nearest
from yafsdp_fn.schedules import Program, Trace, chained_order

TABLE = ROOT / "docs" / "benchmarks" / "llm_foundry_8gpu.csv"
PRECISION = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
TRAFFIC = 18.0
"""Bytes per element and micro-batch that move beside the computation, all in bf16: two gathers, each written and read
to be passed on (2 x 4); gradients divided in front of their reduction (4), which reads its input and writes and reads
partial sums (6). A tied embedding counts twice, once for each of its visits' backwards."""
GATHER = 4.0
"""A gather's part of it, which weights that stay do without."""
FP8_RATE = 2.0
"""Products of layers in fp8 against bf16, as data sheets have them; the head, attention and all else stay in bf16."""

KINDS: dict[str, Cluster] = {
    "a100_40gb": CLUSTERS["a100-80g"].replace(memory_bytes=int(39.4 * 2**30), network_bandwidth=170e9, contention=0.0),
    "a100_80gb": CLUSTERS["a100-80g"].replace(memory_bytes=int(79.1 * 2**30), network_bandwidth=170e9, contention=0.0),
    "h100_80gb": CLUSTERS["h100-80g"].replace(memory_bytes=int(79.1 * 2**30), network_bandwidth=340e9, contention=0.0),
}
"""Kind of GPU -> nodes of eight, before the fit. memory_bytes: all that CUDA has of a card. Links: 85% of the stated
8 x 200 Gbit/s a node for A100; of 8 x 400 Gbit/s for H100, taken and not stated. NVLink, latencies: the presets'.
No contention: `TRAFFIC` counts what it stands for."""


class Row(NamedTuple):
    """A run. micro_batch: sequences of a GPU at a time; accumulation: micro-batches a step; measured: tokens/s/GPU;
    kept: weights stay from a forward to its backward (SHARD_GRAD_OP)"""

    model: str
    gpu: str
    gpus: int
    seq_len: int
    micro_batch: int
    accumulation: int
    recompute: bool
    fp8: bool
    measured: float | None = None
    kept: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a GPU and step."""
        return self.seq_len * self.micro_batch * self.accumulation

    def __str__(self) -> str:
        words = f"{self.model}, {self.gpus} {self.gpu}, {self.seq_len} x {self.micro_batch} x {self.accumulation}"
        return words + ", recomputed" * self.recompute + ", fp8" * self.fp8 + ", SHARD_GRAD_OP" * self.kept


MEASURED = "Throughput (T/s/GPU)"
COLUMNS = ("Model", "GPU", "# GPUs", "SeqLen (T)", "MicroBatchSize", "GradAccum")
BEYOND = "fields beyond the columns"
KEPT = "SHARD_GRAD_OP"
STRATEGIES = {"FULL_SHARD": False, KEPT: True}
PRECISIONS = {"amp_bf16": False, "bf16": False, "amp_fp8": True}


def rows(table: Path = TABLE) -> list[Row]:
    """The rows of a file. Raises ValueError, naming file, line and column, for one that cannot be predicted."""
    return [row(line, at) for at, line in lines_of(table)]


def lines_of(table: Path) -> list[tuple[str, dict[str, str]]]:
    """(file and line, fields by column) of each row of a file. Raises ValueError where that is not such a table."""
    with table.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(file, restkey=BEYOND)
        try:
            wanted = (*COLUMNS, "Activation Checkpointing", "Precision")
            missing = [column for column in wanted if column not in (lines.fieldnames or ())]
            if missing:
                raise ValueError(f"{table}: no column {', '.join(map(repr, missing))}")
            return [(f"{table}, line {lines.line_num}", line) for line in lines]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{table}: {error}") from None


def row(line: Mapping[str, str], at: str) -> Row:
    """Raises ValueError for one that cannot be predicted. at: where it is, for errors"""
    if BEYOND in line:
        raise ValueError(f"{at}: more fields than columns")
    gpus, seq_len, micro_batch, accumulation = (_number(line, column, at) for column in COLUMNS[2:])
    model, gpu = (_one_of(line, column, known, at) for column, known in (("Model", SIZES), ("GPU", KINDS)))
    precision = _one_of(line, "Precision", PRECISIONS, at)
    recompute = _one_of(line, "Activation Checkpointing", {"True": True, "False": False}, at) == "True"
    strategy = line.get("Sharding Strategy") and _one_of(line, "Sharding Strategy", STRATEGIES, at)
    if line.get("Activation CPUOffload"):
        _one_of(line, "Activation CPUOffload", {"False": True}, at)
    fp8, measured = PRECISIONS[precision], _measured(line, at)
    if gpus > 8 and gpus % 8:
        raise ValueError(f"{at}: {gpus} GPUs do not fill nodes of 8")
    counted = mpt_config(model, seq_len).num_parameters
    if line.get("NumParams") and line["NumParams"] != str(counted):
        raise ValueError(f"{at}: NumParams is {line['NumParams']}, the model built here has {counted}")
    return Row(model, gpu, gpus, seq_len, micro_batch, accumulation, recompute, fp8, measured, strategy == KEPT)


def _measured(line: Mapping[str, str], at: str) -> float | None:
    value = line.get(MEASURED) or ""
    try:
        found = float(value) if value else None
    except ValueError:
        found = -1.0
    if found is not None and not 0 < found < 1e12:
        raise ValueError(f"{at}: {MEASURED} is {value!r}, expected a positive number, or nothing")
    return found


def _number(line: Mapping[str, str], column: str, at: str) -> int:
    value = line[column] or ""
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{at}: {column} is {value!r}, expected a positive integer")
    return int(value)


def _one_of(line: Mapping[str, str], column: str, known: Mapping[str, object], at: str) -> str:
    value = line[column] or ""
    if value not in known:
        raise ValueError(f"{at}: {column} is {value!r}; {nearest(value, list(known))}")
    return value


@functools.cache
def _traced(model: str, seq_len: int, micro_batch: int) -> Trace:
    config = mpt_config(model, seq_len)
    tokens = torch.empty((micro_batch, seq_len), dtype=torch.int64, device="meta")
    batch, tx = {"tokens": tokens, "targets": tokens}, ya.optim.adamw(1e-4)
    return trace(mpt_loss(config), gpt2.params(config), batch, ranks=8, precision=PRECISION, tx=tx)


def step(row: Row, microbatches: int) -> Program:
    """FSDP's program of `row`, with so many micro-batches."""
    one = _traced(row.model, row.seq_len, row.micro_batch).on((("shard", row.gpus),))
    visits = one.visits
    if row.fp8:
        layers = ya.schedules.remat.all(one)
        visits = tuple(
            v._replace(
                cost=v.cost._replace(flops=int(v.cost.flops / FP8_RATE), bwd_flops=int(v.cost.bwd_flops / FP8_RATE))
            )
            if v.id in layers
            else v
            for v in visits
        )
    order = chained_order(visits, microbatches)
    whole = one._replace(visits=visits, order=order, microbatches=microbatches)
    traffic = TRAFFIC - GATHER * row.kept
    again = "all" if row.recompute else "none"
    return peers.fsdp(remat=again, growth=0.0, traffic=traffic, reshard=not row.kept)(whole)


_program = functools.cache(step)

Figures = Mapping[str, float]
"""Figures of a kind of GPU, by the names of `Cluster`'s fields."""


def seconds(row: Row, figures: Figures) -> float:
    """Seconds of a step. Micro-batches after the second take as long as the second."""
    cluster = KINDS[row.gpu].replace(**figures)
    first = simulate(_program(row._replace(accumulation=1, measured=None), 1), cluster).seconds
    if row.accumulation == 1:
        return first
    second = simulate(_program(row._replace(accumulation=1, measured=None), 2), cluster).seconds - first
    return first + (row.accumulation - 1) * second


def tokens_per_s(row: Row, figures: Figures) -> float:
    """Tokens a second and GPU."""
    return row.tokens / seconds(row, figures)


def peak(row: Row) -> Memory:
    """Memory of a rank: parameters, optimizer and gradients in fp32, FSDP's units, and what the trace keeps."""
    return predict_memory(step(row, min(row.accumulation, 2)))


SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Name -> width, layers, heads."""


def mpt_config(model: str, seq_len: int) -> gpt2.Config:
    """The shape of `model`, with as many positions as the sequences have.

    MPT has GPT-2's shape, biases included, with a vocabulary of 50,368; the parameter counts of the published rows are
    this shape's to the last one. The head's logits are there as a whole, as they are in those runs (`mpt_loss`);
    `models.gpt2` by itself never has them.
    """
    embed, layers, heads = SIZES[model]
    return gpt2.Config(vocab=50_368, embed=embed, ffn=4 * embed, layers=layers, heads=heads, max_length=seq_len)


def mpt_loss(
    config: Any, decoder: Any = gpt2.DECODER, logits: torch.dtype | None = None
) -> Callable[[Any, Any], ya.Mean]:
    """`loss_fn(params, batch)`: the cross entropy of logits [B, S, V] that are kept for the backward. decoder: of the
    family that `config` is of; logits: the dtype that they are cast to"""
    body, scores = decoder.block(config), decoder.head(config)

    def head(weights: Any, x: Tensor, targets: Tensor) -> ya.Mean:
        found = scores(weights, x).flatten(0, 1)
        found = found if logits is None else found.to(logits)
        return ya.Mean(F.cross_entropy(found, targets.flatten(), reduction="sum").float(), (targets != -100).sum())

    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        x = decoder.embedded(config, params, batch["tokens"], 0, None)
        x, _ = ya.scan(body, x, params.layers)
        found: ya.Mean = ya.apply(head, decoder.head_unit(config, params), x, batch["targets"])
        return found

    return loss_fn
