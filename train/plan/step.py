"""The options of `python -m train plan`, and the step that they describe: traced, on the mesh of a schedule."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import models
import yafsdp_fn as ya
from models.parts.axes import NONE, Axes
from models.parts.config import Shape
from train import schedule_names
from train.config import Inside
from train.running import setup
from yafsdp_fn.lab import peers
from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner import Cluster, trace
from yafsdp_fn.planner.cluster import cluster, nearest
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.planner.space import Order
from yafsdp_fn.schedules import Trace
from yafsdp_fn.util.mesh_axes import MOST_RANKS

MOST = {"gpus": MOST_RANKS, "batch": 2**16, "microbatches": 2**9, "replicate": MOST_RANKS}
"""The largest values of options."""
CARD = 1.3
"""Memory of a GPU, in parts of what tensors may fill of it in a preset."""

Reduce = Literal["fp32", "bf16", "bf16-summed-in-fp32"]
PRECISIONS: dict[str, ya.Precision] = {
    "fp32": ya.Precision(compute=torch.bfloat16),
    "bf16": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    "bf16-summed-in-fp32": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
}
Factory = Callable[..., ya.schedules.Schedule]
"""A factory of schedules; takes `remat`."""

YAFSDP = "yafsdp"
ZERO3 = "zero3"


@dataclasses.dataclass(frozen=True)
class Options:
    model: str = ""
    """A name in models.CONFIGS: llama2-7b, qwen3-8b, mixtral-8x7b, ..."""
    gpus: int = 0
    """Ranks."""
    cluster: str = "a100-80g"
    """a100-80g, h100-80g, h200-141g: nodes of eight GPUs. local: two ranks on two CPU cores."""
    seq_len: int = 2048
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences per rank, over all its microbatches; ranks of --mesh.tensor and --mesh.context share theirs."""
    microbatches: int = 1
    """Parts that a rank's sequences are cut into."""
    mesh: Inside = dataclasses.field(default_factory=Inside)
    ckpt_layers: int | None = None
    """The first so many layers recompute their graph in the backward. Not given: as few as fit."""
    schedule: str = ZERO3
    """A builder, with options after dashes: zero3-resident4, hsdp-prefetch2, hpz, zero2, ddp, fsdp2 (the
    program of torch's fully_shard, without the copies of its code). Or yafsdp: ZeRO-3 as YaFSDP runs it, on a100-80g
    with what nothing explains of its published times."""
    schedules: tuple[str, ...] = ()
    """Compare several, as --schedule names them, in one table and one picture. Pipelines too: an order, stages,
    segments of each, and what a stage does, as one_f_one_b-stages4-zero1 or interleaved-stages4-segments2-zero3. The
    ranks of a stage read as many more sequences, in as many more microbatches: all are steps of the same tokens."""
    replicate: int | None = None
    """Copies of the state, for hsdp. Not given: one per node."""
    search: bool = False
    """Find the fastest schedule of this toolkit that fits, instead of --schedule, on the mesh that suits it: also with
    layers over tensor, and long sequences over context."""
    synthesize: float = 0.0
    """Seconds for writing a program that no builder has, from what --search finds."""
    reduce: Reduce = "fp32"
    """Dtype of gradients on the wire."""
    wire: Literal["none", "int8", "int8-both"] = "none"
    """Format in which the layers' matrices travel: weights in int8, or weights and gradients."""
    memory_gib: float | None = None
    """Memory that a rank may fill. Not given: what the cluster's GPUs have for tensors."""
    timeline: Path | None = Path("plan.png")
    """File to draw the step to: .png, .svg or .pdf. `None`: nowhere."""
    perfetto: Path | None = None
    """File to write the step to as trace events (.json), for https://ui.perfetto.dev."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        if self.model not in models.CONFIGS:
            said = f"unknown model {self.model!r}" if self.model else "expected a model"
            raise ValueError(f"--model: {said}; {nearest(self.model, sorted(models.CONFIGS))}")
        cluster(self.cluster)
        config = models.CONFIGS[self.model]
        for name, most in (("seq_len", config.max_length), *MOST.items()):
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            if value is not None and value < 1:
                raise ValueError(f"{flag} {value}: expected at least 1")
            if value is not None and value > most:
                of = f", the positions that {self.model} was made for" * (name == "seq_len")
                raise ValueError(f"{flag} {value}: expected at most {most:,}{of}")
        if self.batch % self.microbatches:
            raise ValueError(f"--batch {self.batch} does not divide into --microbatches {self.microbatches}")
        card = CARD * cluster(self.cluster).memory_bytes / 2**30
        if self.memory_gib is not None and not 0 < self.memory_gib <= card:
            raise ValueError(
                f"--memory-gib {self.memory_gib}: expected a number above 0, and at most the {card:.0f} that a GPU of "
                f"{self.cluster} has"
            )
        if self.ckpt_layers is not None and not 0 <= self.ckpt_layers <= config.layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: {self.model} has {config.layers} layers")
        if self.synthesize < 0:
            raise ValueError(f"--synthesize {self.synthesize}: expected seconds")
        if self.synthesize and not self.search:
            raise ValueError(f"--synthesize {self.synthesize} begins with what --search finds: add --search")
        own = self.schedule != ZERO3 or self.replicate is not None or self.mesh != Inside()
        if self.search and (own or self.ckpt_layers is not None):
            raise ValueError("--search chooses the schedule, its mesh and its recomputed layers: give none of them")
        if Pipeline.read(self.schedule).order:
            raise ValueError(f"--schedule {self.schedule}: for a pipeline, --schedules {self.schedule}")
        words = {} if self.schedule == YAFSDP else schedule_names.parse(self.schedule, "--schedule")[1]
        if "remat" in words:
            raise ValueError(
                f"--schedule {self.schedule}: instead of -remat, --ckpt-layers {config.layers} recomputes all layers"
            )
        if "chunk" in words and self.ckpt_layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: the chunks of {self.schedule} are recomputed anyway")
        if self.schedule == YAFSDP and (self.mesh != Inside() or self.wire != "none"):
            raise ValueError("--schedule yafsdp: no axes inside of layers, and no int8: leave --mesh and --wire out")
        self._check_schedules()
        shown = self.schedules or (self.schedule,)
        if self.replicate is not None and not any("hsdp" in name for name in shown):
            raise ValueError(f"--replicate is for --schedule hsdp, not {', '.join(shown)}")

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.gpus * self.batch * self.seq_len // (self.mesh.tensor * self.mesh.context)

    @property
    def budget(self) -> int:
        """Bytes that a rank may fill."""
        return cluster(self.cluster).memory_bytes if self.memory_gib is None else int(self.memory_gib * 2**30)

    def _check_schedules(self) -> None:
        if not self.schedules:
            return
        if self.search or self.schedule != ZERO3:
            raise ValueError("--schedules compares what it names: leave --search and --schedule out")
        if doubles := {name for name in self.schedules if self.schedules.count(name) > 1}:
            raise ValueError(f"--schedules {' '.join(self.schedules)}: {', '.join(sorted(doubles))} is there twice")
        for name in self.schedules:
            words = schedule_names.parse(Pipeline.read(name).sharding, "--schedules")[1]
            if "remat" in words:
                raise ValueError(
                    f"--schedules {name}: instead of -remat, --ckpt-layers recomputes that many layers of each"
                )
            if "chunk" in words:
                raise ValueError(f"--schedules {name}: chunks are other microbatches than those of the others")


class Pipeline(NamedTuple):
    """A schedule by name. order: of calls on stages, with segments on each, "" without stages; sharding: of a stage"""

    order: str
    stages: int
    segments: int
    sharding: str

    @staticmethod
    def read(name: str) -> Pipeline:
        """`one_f_one_b-stages4-zero1`, or the name of a schedule without stages. Raises ValueError."""
        order, *words = name.split("-")
        if order not in orders.FACTORIES:
            return Pipeline("", 1, 1, name)
        numbers = {"stages": 0, "segments": orders.SEGMENTS.get(order, 1)}
        while words and (found := re.fullmatch("(stages|segments)([0-9]+)", words[0])):
            numbers[found[1]] = int(found[2])
            del words[0]
        if numbers["stages"] < 2 or numbers["segments"] < 1:
            raise ValueError(f"--schedules {name}: expected two or more stages, as {order}-stages4-zero1")
        return Pipeline(order, numbers["stages"], numbers["segments"], "-".join(words) or "zero2")


# ---- The step, traced.


def schedule_of(options: Options, config: Shape, where: Cluster, name: str) -> tuple[Trace, Factory]:
    """The trace on the mesh of the schedule called `name`, and its factory."""
    if name == YAFSDP:
        return traced(options, config, axes(options.gpus)), peers.yafsdp
    stages = Pipeline.read(name)
    if options.gpus % stages.stages:
        raise ValueError(f"--schedules {name}: {options.gpus} GPUs are not a multiple of {stages.stages} stages")
    builder, words = schedule_names.parse(stages.sharding)
    of = options.mesh
    ranks = options.gpus // stages.stages
    mesh = axes(ranks, **_mesh(builder, ranks, options, where), **of.inside)
    over = Axes(tensor=of.tensor > 1, sequence=of.sequence, context=of.context > 1)
    here = traced(options, config, mesh, words.get("chunk", 1), over)
    factory = partial(schedule_names.make, stages.sharding, config.layers)
    if not stages.order:
        return here, factory
    order = Order(stages.order, stages.stages, stages.segments, here.microbatches * stages.stages)
    whole = order.whole(here, (("stage", stages.stages), *here.mesh))
    return whole, lambda remat: orders.FACTORIES[stages.order](factory(remat=remat))


LONG = 8192
"""Tokens of a sequence that a rank of `context` has at least, where a search splits sequences."""


def over_axes(options: Options, config: Shape, where: Cluster) -> Iterator[Trace]:
    """The step without axes inside layers, and over each that the model and the ranks allow: tensor inside of a node,
    with sequence parallelism, and context where sequences are long."""
    most = max(1, options.seq_len // LONG)
    for context, tensor in itertools.product(_doubling(most), _doubling(where.gpus_per_node)):
        over = Axes(tensor=tensor > 1, sequence=tensor > 1, context=context > 1)
        inside = Inside(tensor=tensor, context=context).inside
        with suppress(ValueError, NotImplementedError):  # what does not divide, and families without a split
            over.check(config, options.seq_len // context, inside)
            yield traced(options, config, axes(options.gpus, **inside), over=over)


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 ... up to `most`."""
    return (2**k for k in range(most.bit_length()))


def traced(
    options: Options, config: Shape, mesh: tuple[tuple[str, int], ...], chunks: int = 1, over: Axes = NONE
) -> Trace:
    """The step of the options on a mesh, with AdamW, clipped."""
    ranks = dict(mesh).get("context", 1)
    over.check(config, options.seq_len // ranks, dict(mesh))
    if options.seq_len % (2 * ranks) and ranks > 1:
        raise ValueError(
            f"--seq-len {options.seq_len}: not a multiple of {2 * ranks}, two parts for each rank of context"
        )
    tokens = torch.empty((options.batch, options.seq_len // ranks), dtype=torch.int64, device="meta")
    of = models.of(config)
    return trace(
        of.loss(config, chunks=chunks, axes=over),
        setup.travelling(of.params(config, **over.options), options.wire),
        {"tokens": tokens, "targets": tokens},
        mesh=mesh,
        precision=PRECISIONS[options.reduce],
        microbatches=options.microbatches,
        tx=ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4)),
    )


def _mesh(builder: str, ranks: int, options: Options, where: Cluster) -> dict[str, int]:
    """Arguments of `ya.mesh` for a builder on so many ranks."""
    match builder:
        case "hsdp":
            return {"replicate": options.replicate or max(1, ranks // where.gpus_per_node)}
        case "ddp":
            return {"replicate": ranks}
        case "hpz":
            return {"local": min(where.gpus_per_node, ranks)}
        case _:
            return {}
