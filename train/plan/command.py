"""`python -m train plan`: options in, a table or JSON out, and the step as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import models
import yafsdp_fn as ya
from models.parts.axes import NONE, Axes
from models.parts.config import Shape
from train.bench import names
from train.command_line import cli
from train.plan import torchtitan
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, Cluster, Found, Plan, min_ckpt_layers, search, simulate, trace
from yafsdp_fn.planner.cluster import cluster, nearest
from yafsdp_fn.planner.footprint import words
from yafsdp_fn.planner.plan import PARTS, axes
from yafsdp_fn.schedules import Trace
from yafsdp_fn.timeline import Timeline

PROGRAM = "python -m train plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own); returns the exit status.

    That is 2 where nothing fits, but for a number of recomputed layers that was asked for; the plan is shown even so.
    """
    errors = Console(stderr=True)
    try:
        options = cli(Options, argv, prog=PROGRAM)
        result = torchtitan.run(options) if options.torchtitan is not None else run(options)
        if options.json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            result.show(Console())
        timeline = result.plan.timeline
        for path, write in ((options.timeline, timeline.save), (options.perfetto, timeline.perfetto)):
            if path is not None:
                write(path)
                errors.print(f"wrote {path}", markup=False, highlight=False)
        if options.ckpt_layers is None:
            result.plan.check()
    except (ValueError, ModuleNotFoundError, OSError) as error:
        errors.print(f"plan: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


def run(options: Options) -> Result:
    """Traces the model, plans its step, and simulates others beside it. Raises DoesNotFit where a search finds none.

    On a100-80g FSDP and YaFSDP are as they were where they were published: on `peers.AS_RUN`.
    """
    config, where = models.CONFIGS[options.model], cluster(options.cluster)
    published = peers.AS_RUN if where is CLUSTERS["a100-80g"] else where
    budget = where.memory_bytes if options.memory_gib is None else int(options.memory_gib * 2**30)
    flat = _traced(options, config, axes(options.gpus))
    found = search([*_over_axes(options, config, where)], where, memory=budget) if options.search else None
    here, factory = _schedule(options, config, flat, where)
    least = min_ckpt_layers(here, budget, factory)
    fitting = config.layers if least is None else least
    recomputed = fitting if options.ckpt_layers is None else options.ckpt_layers
    again = ya.schedules.remat.first(recomputed)
    if found is not None:
        program, name = found.program, str(found.best.point)
    else:
        words = [*(f"{axis} {ranks}" for axis, ranks in options.mesh.inside.items()), options.schedule]
        program = factory(remat=again)(here)
        name = f"{', '.join(words)}, {recomputed} of {config.layers} layers recomputed"
    plan = Plan.of(program, published if options.schedule == YAFSDP else where, budget)
    others = {
        "fsdp": simulate(peers.fsdp(remat=again)(flat), published),
        "fsdp2": simulate(peers.fsdp2(remat=again)(flat), where),
        "yafsdp": simulate(peers.yafsdp(remat=again)(flat), published),
        "zero3": simulate(ya.schedules.zero3(remat=again)(flat), where),
    }
    return Result(options, plan, name, others, recomputed, least, found)


def _schedule(
    options: Options, config: Shape, flat: Trace, where: Cluster
) -> tuple[Trace, Callable[..., ya.schedules.Schedule]]:
    """The trace on the mesh of what --schedule names, and its factory. flat: the trace on a mesh of shards alone."""
    if options.schedule == YAFSDP:
        return flat, peers.yafsdp
    builder, words = names.parse(options.schedule)
    of = options.mesh
    mesh = axes(options.gpus, **_mesh(builder, options, where), **of.inside)
    over = Axes(tensor=of.tensor > 1, sequence=of.sequence, context=of.context > 1)
    here = _traced(options, config, mesh, words.get("chunk", 1), over)
    return here, partial(names.make, options.schedule, config.layers)


LONG = 8192
"""Tokens of a sequence that a rank of `context` has at least, where a search splits sequences."""


def _over_axes(options: Options, config: Shape, where: Cluster) -> Iterator[Trace]:
    """The step without axes inside layers, and over each that the model and the ranks allow: tensor inside of a node,
    with sequence parallelism, and context where sequences are long."""
    most = max(1, options.seq_len // LONG)
    for context, tensor in itertools.product(_doubling(most), _doubling(where.gpus_per_node)):
        over = Axes(tensor=tensor > 1, sequence=tensor > 1, context=context > 1)
        inside = {name: size for name, size in (("context", context), ("tensor", tensor)) if size > 1}
        with suppress(ValueError, NotImplementedError):  # what does not divide, and families without a split
            over.check(config, options.seq_len // context, inside)
            yield _traced(options, config, axes(options.gpus, **inside), over=over)


def _doubling(most: int) -> Iterator[int]:
    return (2**k for k in range(most.bit_length()))


def _traced(
    options: Options, config: Shape, mesh: tuple[tuple[str, int], ...], chunks: int = 1, over: Axes = NONE
) -> Trace:
    ranks = dict(mesh).get("context", 1)
    over.check(config, options.seq_len // ranks, dict(mesh))
    if options.seq_len % (2 * ranks) and ranks > 1:
        raise ValueError(
            f"--seq-len {options.seq_len}: not a multiple of {2 * ranks}, two parts for each rank of context"
        )
    tokens = torch.empty((options.batch, options.seq_len // ranks), dtype=torch.int64, device="meta")
    return trace(
        models.of(config).loss(config, chunks=chunks, axes=over),
        models.of(config).params(config, **over.options),
        {"tokens": tokens, "targets": tokens},
        mesh=mesh,
        precision=PRECISIONS[options.reduce],
        microbatches=options.microbatches,
        tx=ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4)),
    )


def _mesh(builder: str, options: Options, where: Cluster) -> dict[str, int]:
    """Arguments of `ya.mesh` for a builder."""
    match builder:
        case "hsdp":
            return {"replicate": options.replicate or max(1, options.gpus // where.gpus_per_node)}
        case "ddp":
            return {"replicate": options.gpus}
        case "hpz":
            return {"local": min(where.gpus_per_node, options.gpus)}
        case _:
            return {}


Reduce = Literal["fp32", "bf16", "bf16-summed-in-fp32"]
PRECISIONS: dict[str, ya.Precision] = {
    "fp32": ya.Precision(compute=torch.bfloat16),
    "bf16": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    "bf16-summed-in-fp32": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
}
YAFSDP = "yafsdp"
ZERO3 = "zero3"


@dataclasses.dataclass(frozen=True)
class Inside:
    tensor: int = 1
    """Ranks that a layer is split over: heads, features and the vocabulary. Neighbours, so inside of a node."""
    sequence: bool = False
    """Ranks of --mesh.tensor have a part of the positions each between sublayers."""
    context: int = 1
    """Ranks that each sequence is split over."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.context) < 1 or (self.sequence and self.tensor == 1):
            raise ValueError(
                f"--mesh: expected ranks of at least 1, and sequence with two or more of tensor; got {self}"
            )

    @property
    def inside(self) -> dict[str, int]:
        """The axes as `ya.mesh` takes them; those of one rank are left out."""
        return {name: ranks for name in ("context", "tensor") if (ranks := getattr(self, name)) > 1}


@dataclasses.dataclass(frozen=True)
class Options:
    model: str = ""
    """A name in models.CONFIGS: llama2-7b, qwen3-8b, mixtral-8x7b, ..."""
    gpus: int = 0
    """Ranks. With --torchtitan they may be left out where the file has the number of shards."""
    torchtitan: Path | None = None
    """The TOML file of a torchtitan job, in place of a model and all that is said of its step: the program that the job
    runs, proved and predicted, beside the fastest of this toolkit."""
    cluster: str = "a100-80g"
    """a100-80g, h100-80g, h200-141g: nodes of eight GPUs. local: two ranks on two CPU cores."""
    seq_len: int = 2048
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences per rank, over all its microbatches; ranks of --mesh.tensor and --mesh.context share theirs."""
    microbatches: int = 1
    """Parts that a rank's sequences are cut into."""
    mesh: Inside = Inside()
    ckpt_layers: int | None = None
    """The first so many layers recompute their graph in the backward. Not given: as few as fit."""
    schedule: str = ZERO3
    """A builder of this toolkit, with options after dashes: zero3-resident4, hsdp-prefetch2, hpz, zero2, ddp. Or
    yafsdp: ZeRO-3 as YaFSDP runs it, on a100-80g with what nothing explains of its published times."""
    replicate: int | None = None
    """Copies of the state, for hsdp. Not given: one per node."""
    search: bool = False
    """Find the fastest schedule of this toolkit that fits, instead of --schedule, on the mesh that suits it: also with
    layers over tensor, and long sequences over context."""
    reduce: Reduce = "fp32"
    """Dtype of gradients on the wire."""
    memory_gib: float | None = None
    """Memory that a rank may fill. Not given: what the cluster's GPUs have for tensors."""
    gpu_hour_price: float = 2.0
    """Dollars."""
    csv: Path | None = None
    """File to write the order of the fastest pipeline to, for torchtitan's pipeline_parallel_schedule_csv; of a
    --torchtitan job with stages."""
    timeline: Path | None = Path("plan.png")
    """File to draw the step to: .png, .svg or .pdf. `None`: nowhere."""
    perfetto: Path | None = None
    """File to write the step to as trace events (.json), for https://ui.perfetto.dev."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        in_file = ("model", *torchtitan.SAID_BY_FILE) if self.torchtitan is not None else ()
        if given := [name for name in in_file if getattr(self, name) != getattr(Options, name)]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--torchtitan {self.torchtitan}: the file says what the step is; leave out {flags}")
        if self.csv is not None and self.torchtitan is None:
            raise ValueError(f"--csv {self.csv}: it is for the stages of a job: give --torchtitan, too")
        if self.torchtitan is None and self.model not in models.CONFIGS:
            raise ValueError(f"--model: unknown model {self.model!r}; {nearest(self.model, sorted(models.CONFIGS))}")
        cluster(self.cluster)
        for name in ("gpus", "seq_len", "batch", "microbatches", "replicate"):
            value = getattr(self, name)
            if value is not None and value < (name != "gpus" or self.torchtitan is None):
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise ValueError(f"--memory-gib {self.memory_gib}: expected a number above 0")
        if not 0 <= self.gpu_hour_price < math.inf:
            raise ValueError(f"--gpu-hour-price {self.gpu_hour_price}: expected a number of dollars, at least 0")
        layers = models.CONFIGS[self.model].layers if self.torchtitan is None else 0
        if self.ckpt_layers is not None and not 0 <= self.ckpt_layers <= layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: {self.model} has {layers} layers")
        own = self.schedule != ZERO3 or self.replicate is not None or self.mesh != Inside()
        if self.search and (own or self.ckpt_layers is not None):
            raise ValueError("--search chooses the schedule, its mesh and its recomputed layers: give none of them")
        words = {} if self.schedule == YAFSDP else names.parse(self.schedule, "--schedule")[1]
        if "remat" in words:
            raise ValueError(
                f"--schedule {self.schedule}: instead of -remat, --ckpt-layers {layers} recomputes all layers"
            )
        if "chunk" in words and self.ckpt_layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: the chunks of {self.schedule} are recomputed anyway")
        if self.schedule == YAFSDP and self.mesh != Inside():
            raise ValueError("--schedule yafsdp: YaFSDP has no axes inside of layers; leave --mesh out")
        if self.replicate is not None and not self.schedule.startswith("hsdp"):
            raise ValueError(f"--replicate is for --schedule hsdp, not {self.schedule}")


OTHERS = {
    "fsdp": "FSDP as fitted",
    "fsdp2": "FSDP2, with the copies of its code",
    "yafsdp": "YaFSDP as fitted",
    "zero3": "zero3: two communicators, no copies",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """A plan, and others beside it. others: the step of other schedules, with `recomputed` layers recomputed."""

    options: Options
    plan: Plan
    schedule: str
    others: dict[str, Timeline]
    recomputed: int
    min_ckpt_layers: int | None
    found: Found | None

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        of = self.options.mesh
        return self.flat_tokens // (of.tensor * of.context)

    @property
    def flat_tokens(self) -> int:
        """Tokens of a step of the others, in which every rank has sequences of its own."""
        return self.options.gpus * self.options.batch * self.options.seq_len

    def saved(self, other: str) -> float:
        """The part of another schedule's GPU hours that the same tokens do without.

        Like with like: what nothing explains of published runs is in neither.
        """
        ours, theirs = (each.seconds - each.overhead for each in (self.plan.timeline, self.others[other]))
        return 1 - ours / theirs * (self.flat_tokens / self.tokens)

    def as_json(self) -> dict[str, Any]:
        plan, gpus = self.plan, self.options.gpus
        return {
            "model": self.options.model,
            "gpus": gpus,
            "cluster": plan.cluster.name,
            "seq_len": self.options.seq_len,
            "batch": self.options.batch,
            "microbatches": self.options.microbatches,
            "schedule": self.schedule,
            "mesh": dict(plan.program.trace.mesh),
            "step_s": plan.step_s,
            **{f"{other}_step_s": timeline.seconds for other, timeline in self.others.items()},
            "unexplained_s": {other: timeline.overhead for other, timeline in self.others.items()},
            "compute_s": plan.work.compute_s,
            "comm_s": plan.work.comm_s,
            "overhead_s": plan.work.overhead_s,
            "bound": plan.bound,
            "headroom": plan.headroom,
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens / plan.step_s,
            "gpus_saved": {other: gpus * self.saved(other) for other in ("fsdp", "fsdp2")},
            "dollars_saved_per_day": {other: self._dollars(other) for other in ("fsdp", "fsdp2")},
            "peak_bytes": plan.memory.peak_bytes,
            "budget_bytes": plan.budget,
            "fits": plan.fits,
            "why_not": plan.memory.why_not(plan.budget),
            "memory": plan.memory.itemised(),
            "min_ckpt_layers": self.min_ckpt_layers,
            "sensitivity": plan.sensitivity(),
        }

    def show(self, console: Console) -> None:
        """Prints the result for people."""
        options, plan, config = self.options, self.plan, models.CONFIGS[self.options.model]
        numel = config.num_parameters
        inside = [f"{name} {ranks}" for name, ranks in options.mesh.inside.items()]
        shared = f"for {' x '.join(inside)} ranks" if inside else "a rank"
        size = f"{numel / 1e9:.1f}B" if numel > 1e8 else f"{numel / 1e6:.1f}M"
        console.print(
            f"[bold]{options.model}[/], {size} parameters, on {options.gpus} GPUs "
            f"({plan.cluster.name}); {options.batch} x {options.seq_len} tokens {shared}, {self.tokens:,} a step\n",
            highlight=False,
            soft_wrap=True,
        )
        console.print(self._time(), "", self._others(), sep="\n")
        doubt = '; "saved" leaves out what is unexplained' * (self.others["yafsdp"].overhead > 0)
        console.print(f"as fitted: to published times{doubt}\n", highlight=False)
        console.print(_memory(plan), "", sep="\n")
        fewest = "not even all fit" if self.min_ckpt_layers is None else f"{self.min_ckpt_layers} of {config.layers}"
        console.print(f"fewest layers that must recompute with {self.options.schedule}: {fewest}", highlight=False)
        if not plan.fits and options.ckpt_layers is not None:  # else it is the command's error
            why = f"does not fit: {plan.memory.why_not(plan.budget)}"
            console.print(why, style="red", markup=False, highlight=False, soft_wrap=True)
        if self.found is not None:
            searched = f"\nsearched for the same {self.tokens:,} tokens a step\n{self.found}"
            console.print(searched, markup=False, highlight=False, soft_wrap=True)

    def _time(self) -> Table:
        plan, rate = self.plan, self.tokens / self.plan.step_s
        gains = sorted(plan.sensitivity().items(), key=lambda item: -item[1])[:3]
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="cyan")
        table.add_column(overflow="fold")
        table.add_row("schedule", self.schedule)
        table.add_row(
            "step", f"[bold]{plan.step_s:.3f} s[/], {rate:,.0f} tokens/s, {rate / self.options.gpus:,.0f} a GPU"
        )
        alone = zip(PARTS, plan.work, strict=True)
        table.add_row("alone", ", ".join(f"{part} {seconds:.3f} s" for part, seconds in alone))
        table.add_row("bound by", f"{plan.bound_in_words}; a perfect overlap would save {100 * plan.headroom:.1f}%")
        table.add_row("1% better", ", ".join(f"{name} -{gain:.2f}%" for name, gain in gains))
        return table

    def _others(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column(f"others, {self.recomputed} layers recomputed")
        for heading in ("step, s", "tokens/s", "saved", "GPUs", "$ a day"):
            table.add_column(heading, justify="right")
        for other, timeline in self.others.items():
            part = self.saved(other)
            spared = (f"{100 * part:.1f}%", f"{round(part * self.options.gpus)}", f"{round(self._dollars(other)):,}")
            doubt = f", {timeline.overhead:.2f} s unexplained" if timeline.overhead else ""
            rate = f"{self.flat_tokens / timeline.seconds:,.0f}"
            table.add_row(OTHERS[other] + doubt, f"{timeline.seconds:.3f}", rate, *spared)
        return table

    def _dollars(self, other: str) -> float:
        """Dollars that a day of the same tokens costs less."""
        return self.saved(other) * self.options.gpus * 24 * self.options.gpu_hour_price


def _memory(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory of a rank at its peak")
    for heading in ("GiB", "part"):
        table.add_column(heading, justify="right")
    peak = max(plan.memory.peak_bytes, 1)
    for name, size in plan.memory.itemised().items():
        if size:
            table.add_row(words(name), f"{size / 2**30:.2f}", f"{size / peak:.0%}")
    table.add_section()
    table.add_row("all", f"{peak / 2**30:.2f}", f"of {plan.budget / 2**30:.1f}")
    return table
