"""Published runs with tensor, context and pipeline parallelism, predicted: `python -m benchmarks published --axes`.

    step(row)              the family of `models` over the row's axes, cut into its stages: 1F1B, interleaved, or ZeRO-3
    seconds(row, figures)  simulated in as many microbatches as the row has, or in P and in 2 P of them, and a straight
                           line beyond
    KINDS                  nodes of each kind of GPU: the presets' rates

Nothing is fitted to the rows. Taken, where the sources do not say: PTD-P's stages are not interleaved; torchtitan has
as many microbatches as stages, which is its default, and two segments a stage where they are interleaved; Llama 3 has
one layer in each segment, since its first has the embedding alone and its last the head, and counts FLOPs as the paper
that it cites (PaLM), attention in whole squares. Not modelled: asynchronous tensor parallelism, which hides collectives
behind the products before and after them.
"""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch

import models
import yafsdp_fn as ya
from benchmarks.published.foundry import FP8_RATE
from models import gpt2
from models.parts.axes import Axes
from models.parts.config import Shape
from train.machine import ROOT
from yafsdp_fn.planner import CLUSTERS, Cluster, simulate, trace
from yafsdp_fn.planner.costs import by_ops
from yafsdp_fn.planner.plan import axes as mesh_of
from yafsdp_fn.planner.space import Order
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.schedules import Program, Trace, pipelines, remat
from yafsdp_fn.util.mesh_axes import AxisCollective

TABLE = ROOT / "docs" / "benchmarks" / "published_axes.csv"
A100, H100 = CLUSTERS["a100-80g"].replace(network_bandwidth=170e9), CLUSTERS["h100-80g"]
HBM2E = H100.memory_bandwidth * 2.4 / 3.35
KINDS: dict[str, Cluster] = {
    "A100 80GB": A100,
    "H100 80GB": H100,
    "H100 96GB HBM2e": H100.replace(memory_bandwidth=HBM2E),
    "H100 95GB HBM2e, lower TDP": H100.replace(memory_bandwidth=HBM2E),
}
"""Kind of GPU -> nodes of eight: presets; 85% of the 8 x 200 Gbit/s that the A100 nodes have, 85% of 8 x 400 Gbit/s for
H100; and memory in proportion to the data sheets' 2.4 and 3.35 TB/s. A lower limit of power is in no figure."""


class Row(NamedTuple):
    """A run. sequences: of a step, of the ranks that share rows; segments: of each stage; measured: in `unit`, of a
    GPU; uneven: each rank of `context` has one part of the sequences, and the last one meets all keys"""

    run: str
    model: str
    gpu: str
    gpus: int
    tensor: int
    context: int
    stages: int
    segments: int
    seq_len: int
    sequences: int
    microbatches: int
    precision: str
    async_tensor: str
    recompute: str
    measured: float
    unit: str
    source: str
    uneven: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of a step and GPU."""
        return self.seq_len * self.sequences / (self.tensor * self.context * self.stages)

    @property
    def stops_early(self) -> bool:
        """Says whether torch's checkpoint recomputes layers, which stops at the last that is saved."""
        return self.recompute == "all" and self.run == "torchtitan"

    @property
    def inside(self) -> dict[str, int]:
        return {name: n for name, n in (("context", self.context), ("tensor", self.tensor)) if n > 1}

    def __str__(self) -> str:
        words = [f"{name} {n}" for name, n in {**self.inside, "stages": self.stages}.items() if n > 1]
        words += [f"{self.segments} segments"] * (self.segments > 1) + ["async TP"] * (self.async_tensor == "yes")
        of = f"{self.run}, {self.model}, {self.gpus} GPUs, {self.seq_len} tokens"
        return ", ".join([of, *words, self.precision])


def rows(table: Path = TABLE) -> list[Row]:
    kinds = {name: kind for name, kind in get_type_hints(Row).items() if name not in Row._field_defaults}
    with table.open(newline="") as file:
        lines = [*csv.DictReader(file)]
    return [Row(**{name: kind(line[name]) for name, kind in kinds.items()}) for line in lines]


GPTS: dict[str, gpt2.Config] = {
    "gpt-175b": gpt2.Config(vocab=51_200, embed=12_288, ffn=49_152, layers=96, heads=96, max_length=2048),
    "gpt-530b": gpt2.Config(vocab=51_200, embed=20_480, ffn=81_920, layers=105, heads=128, max_length=2048),
}


def config_of(row: Row) -> Shape:
    return GPTS[row.model] if row.model in GPTS else models.CONFIGS[row.model]


@functools.cache
def _traced(row: Row) -> Trace:
    """One microbatch of `row`, on ranks of one stage."""
    config, wire = config_of(row), torch.bfloat16 if row.precision == "fp16" else torch.float32
    over = Axes(tensor=row.tensor > 1, sequence=row.tensor > 1 and row.precision != "fp16", context=row.context > 1)
    rows = row.sequences // row.microbatches
    tokens = torch.empty(rows, row.seq_len // row.context, dtype=torch.int64, device="meta")
    found = trace(
        models.of(config).loss(config, axes=over),
        models.of(config).params(config, **over.options),
        {"tokens": tokens, "targets": tokens},
        mesh=mesh_of(row.gpus // row.stages, **row.inside),
        precision=ya.Precision(compute=torch.bfloat16, reduce=wire),
        tx=ya.optim.adamw(1e-4),
    )
    layers = remat.layer_visits(found)
    found = found._replace(visits=tuple(_as_run(row, v) if v.id in layers else v for v in found.visits))
    if row.recompute == "half":
        return by_ops(found, "op")
    return by_ops(found, "checkpoint") if row.stops_early else found


def _as_run(row: Row, layer: Visit) -> Visit:
    """A layer as `row` runs it.

    fp8       products at `FP8_RATE`; casts, through memory; gathers over tensor after them
    fp16      attention of 2021: products of whole squares, whose scores are kept: as they are, masked and dropped, 5
              bytes each
    """
    cost, config = layer.cost, config_of(row)
    tokens = row.sequences // row.microbatches * row.seq_len // row.context
    moved, products = 0, {name: getattr(cost, name) for name in ("flops", "bwd_flops", "last_flops")}
    if row.uneven:
        most = 2 - 1 / row.context  # of the mean
        attention, bwd_attention = int(cost.attention_flops * most), int(cost.bwd_attention_flops * most)
        cost = cost._replace(attention_flops=attention, bwd_attention_flops=bwd_attention)
    if row.precision == "fp8":
        products = {name: int(flops / FP8_RATE) for name, flops in products.items()}
        moved += cast_bytes(config, tokens) // row.tensor
        calls = [[_in_fp8(call) for call in each] for each in (layer.collectives, layer.adjoints)]
        layer = layer._replace(collectives=tuple(calls[0]), adjoints=tuple(calls[1]))
    cost = moving(cost, moved)._replace(**products)
    if row.precision == "fp16":
        cost = with_scores(cost, tokens, row.seq_len, config.heads // row.tensor)
    return layer._replace(cost=cost)


def with_scores(cost: Cost, tokens: int, seq_len: int, heads: int) -> Cost:
    """`cost` with attention by products of whole squares, whose scores are kept: as they are, masked and dropped, 5
    bytes each (Korthikanti et al. 2022), and move six times."""
    products, scores = 2 * cost.attention_flops, tokens * seq_len * heads
    cost = cost._replace(
        flops=cost.flops + products,
        bwd_flops=cost.bwd_flops + 2 * products,
        attention_flops=0,
        bwd_attention_flops=0,
        kept_bytes=cost.kept_bytes + 5 * scores,
        inner_bytes=cost.inner_bytes + 5 * scores,
    )
    return moving(cost, 30 * scores)


def moving(cost: Cost, nbytes: int) -> Cost:
    """`cost` with so many bytes more through memory, a third of them in forward."""
    forward = nbytes // 3
    return cost._replace(moved=cost.moved.more(forward), bwd_moved=cost.bwd_moved.more(nbytes - forward))


def cast_bytes(config: Any, tokens: int) -> int:
    """Bytes that casts of a layer move, in forward and backward: each factor is read for its scale and to be cast, and
    written in the layouts that products take. Inputs 11, weights 10, gradients of outputs 7 bytes an element."""
    E, Q, KV, F_ = config.embed, config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn
    inputs, outputs = 5 * E + Q + F_, Q + 2 * KV + 2 * F_ + 2 * E
    nbytes: int = tokens * (11 * inputs + 7 * outputs) + 10 * (E * (2 * Q + 2 * KV) + 3 * E * F_)
    return nbytes


def _in_fp8(call: AxisCollective) -> AxisCollective:
    return call._replace(nbytes=call.nbytes // 2) if (call.axis, call.kind) == ("tensor", "all_gather") else call


def step(row: Row, microbatches: int) -> Program:
    """The program of `row` in so many microbatches. Across stages weights are gathered once and gradients reduced once
    a step; without, weights are gathered for each half of it (FSDP)."""
    again = "all" if row.recompute == "all" and not row.stops_early else "none"
    one = _traced(row._replace(measured=0.0, async_tensor="no"))
    if row.stages == 1:
        return ya.schedules.zero3(remat=again, prefetch=2)(one)
    order = Order("interleaved" if row.segments > 1 else "one_f_one_b", row.stages, row.segments, microbatches)
    mesh = (("stage", row.stages), *one.mesh)
    if row.precision == "fp16":  # copies of the state, whole but for tensor
        replicas = row.gpus // row.stages // row.tensor
        mesh = (("stage", row.stages), ("replicate", replicas), ("shard", 1), *one.inside)
    return pipelines.FACTORIES[order.name](ya.schedules.zero1(remat=again))(order.whole(one, mesh))


_program = functools.lru_cache(4)(step)


def seconds(row: Row, cluster: Cluster) -> float:
    """Seconds of a step. Microbatches beyond twice the stages take as long as those before."""
    row = row._replace(measured=0.0)
    most, few = 2 * row.stages, row.stages
    if row.stages == 1 or row.microbatches <= most:
        return simulate(_program(row, row.microbatches), cluster).seconds
    two, one = (simulate(_program(_cut(row, n), n), cluster).seconds for n in (most, few))
    return two + (row.microbatches - most) * (two - one) / (most - few)


def _cut(row: Row, microbatches: int) -> Row:
    """`row` with so many of its microbatches."""
    return row._replace(microbatches=microbatches, sequences=row.sequences // row.microbatches * microbatches)


def rate(row: Row, seconds: float) -> float:
    """Returns what a step of so many seconds comes to in the row's unit, of a GPU.

    TFLOP/s: 6 for each element that is multiplied, and attention in whole squares; with recomputation: PTD-P's formula
    """
    config: Any = config_of(row)
    tokens = row.tokens
    match row.unit:
        case "tokens/s":
            return tokens / seconds
        case "TFLOP/s":
            attention = 12 * config.layers * config.heads * config.head_dim * row.seq_len
            flops: float = tokens * (6 * config.multiplied + attention)
        case _:
            layers, width = config.layers, config.embed
            shape = 1 + row.seq_len / (6 * width) + config.vocab / (16 * layers * width)
            flops = tokens * 96 * layers * width**2 * shape
    return flops / seconds / 1e12


class Predicted(NamedTuple):
    """A row, and its rate as predicted, in its unit."""

    row: Row
    rate: float

    @property
    def error(self) -> float:
        """The error in percent of what was measured."""
        return 100 * (self.rate / self.row.measured - 1)


def predict(row: Row) -> Predicted:
    return Predicted(row, rate(row, seconds(row, KINDS[row.gpu])))


def show(as_json: bool) -> None:
    """Prints each row with what was measured and what is predicted, and the errors of each run."""
    found: list[Predicted] = []
    for row in rows():
        found.append(one := predict(row))
        if not as_json:
            line = f"{row!s:<100} {row.measured:6.0f} {one.rate:7.1f} {one.error:+6.1f}%  {row.unit}"
            if row.context > 1:
                other = predict(row._replace(uneven=True))
                line += f"; uneven over context: {other.rate:.1f} {other.error:+.1f}%"
            print(line, flush=True)
    if as_json:
        lines = [{**one.row._asdict(), "predicted": one.rate, "error": one.error} for one in found]
        print(json.dumps(lines, indent=1))
        return
    for run in dict.fromkeys(one.row.run for one in found):
        errors = np.abs([one.error for one in found if one.row.run == run])
        within = sum(errors <= 10)
        words = f"median {np.median(errors):.1f}%, largest {errors.max():.1f}%, {within} of {len(errors)} within 10%"
        print(f"{run}: {words}")
