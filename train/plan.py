"""`python -m train plan`: what a Llama would take on a cluster: time, memory, money, and the timeline as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import yafsdp_fn as ya
from models import llama
from train.bench import schedules
from yafsdp_fn.plan import Found, Plan, min_ckpt_layers, peers, search, simulate, trace
from yafsdp_fn.plan.cluster import Cluster, cluster, nearest
from yafsdp_fn.plan.plan import axes
from yafsdp_fn.schedules import Forward, Trace, verify

Reduce = Literal["fp32", "bf16", "bf16-summed-in-fp32"]
PRECISIONS: dict[str, ya.Precision] = {
    "fp32": ya.Precision(compute=torch.bfloat16),
    "bf16": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    "bf16-summed-in-fp32": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
}


@dataclasses.dataclass(frozen=True)
class Options:
    model: str
    """A name of models.llama: llama2-7b, llama3.1-405b, ..."""
    gpus: int
    """Ranks."""
    cluster: str = "a100-80g"
    """a100-80g, h100-80g, h200-141g: nodes of eight GPUs; or local."""
    seq_len: int = 2048
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences per rank, over all its microbatches."""
    microbatches: int = 1
    """Parts that a rank's sequences are cut into."""
    ckpt_layers: int | None = None
    """The first so many layers recompute their graph in the backward. Not given: as few as fit."""
    schedule: str = "zero3"
    """A builder, with options after dashes: zero3-resident4, hsdp-prefetch2, hpz, zero2, ddp."""
    replicate: int | None = None
    """Copies of the state, for hsdp. Not given: one per node."""
    search: bool = False
    """Find the fastest schedule that fits, instead of --schedule."""
    reduce: Reduce = "fp32"
    """What gradients travel in."""
    memory_gib: float | None = None
    """What a rank may fill. Not given: what the cluster's GPUs have for tensors."""
    gpu_hour_price: float = 2.0
    """Dollars."""
    timeline: Path | None = Path("plan.png")
    """Where to draw the step: .png, .svg or .pdf. `None`: nowhere."""
    perfetto: Path | None = None
    """Where to write the step as trace events (.json), for https://ui.perfetto.dev."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        if self.model not in llama.CONFIGS:
            raise ValueError(f"--model: unknown model {self.model!r}; {nearest(self.model, sorted(llama.CONFIGS))}")
        cluster(self.cluster)
        for name in ("gpus", "seq_len", "batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        layers = llama.CONFIGS[self.model].layers
        if self.ckpt_layers is not None and not 0 <= self.ckpt_layers <= layers:
            raise ValueError(f"--ckpt-layers {self.ckpt_layers}: {self.model} has {layers} layers")
        if self.search and (self.ckpt_layers is not None or self.schedule != "zero3" or self.replicate is not None):
            raise ValueError("--search chooses the schedule, its mesh and its recomputed layers: give none of them")
        builder = schedules.parse(self.schedule)[0]
        if self.replicate is not None and builder != "hsdp":
            raise ValueError(f"--replicate is for --schedule hsdp, not {builder}")


@dataclasses.dataclass(frozen=True)
class Result:
    """What there is to say. fsdp_step_s: of FSDP on the same cluster, with the same layers recomputed."""

    options: Options
    plan: Plan
    fsdp_step_s: float
    schedule: str
    min_ckpt_layers: int | None
    found: Found | None

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.options.gpus * self.options.batch * self.options.seq_len

    @property
    def saved(self) -> float:
        """The part of FSDP's GPU hours that the same tokens do without."""
        return 1 - self.plan.step_s / self.fsdp_step_s

    def as_json(self) -> dict[str, Any]:
        plan, price = self.plan, self.options.gpu_hour_price
        return {
            "model": self.options.model,
            "gpus": self.options.gpus,
            "cluster": plan.cluster.name,
            "seq_len": self.options.seq_len,
            "batch": self.options.batch,
            "microbatches": self.options.microbatches,
            "schedule": self.schedule,
            "mesh": dict(plan.program.trace.mesh),
            "step_s": plan.step_s,
            "fsdp_step_s": self.fsdp_step_s,
            "compute_s": plan.work.compute_s,
            "comm_s": plan.work.comm_s,
            "bound": plan.bound,
            "headroom": plan.headroom,
            "tokens_per_second": self.tokens / plan.step_s,
            "gpus_saved": self.options.gpus * self.saved,
            "dollars_saved_per_day": self.options.gpus * self.saved * 24 * price,
            "peak_bytes": plan.memory.peak_bytes,
            "budget_bytes": plan.budget,
            "fits": plan.fits,
            "memory": plan.memory.itemised(),
            "min_ckpt_layers": self.min_ckpt_layers,
            "sensitivity": plan.sensitivity(),
        }

    def show(self, console: Console) -> None:
        """The same for people."""
        o, plan, work = self.options, self.plan, self.plan.work
        params = llama.CONFIGS[o.model].num_parameters
        console.print(
            f"[bold]{o.model}[/], {params / 1e9:.1f}B parameters, on {o.gpus} GPUs ({plan.cluster.name}); "
            f"{o.batch} x {o.seq_len} tokens a rank, {self.tokens:,} a step",
            highlight=False,
        )
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="cyan")
        table.add_column()
        rate = self.tokens / plan.step_s
        table.add_row("schedule", self.schedule)
        table.add_row("step", f"{plan.step_s:.3f} s   {rate:,.0f} tokens/s, {rate / o.gpus:,.0f} per GPU")
        table.add_row("compute", f"{work.compute_s:.3f} s")
        table.add_row("communication", f"{work.comm_s:.3f} s")
        table.add_row("bound", f"{plan.bound}; {100 * plan.headroom:.1f}% of the step is above it")
        table.add_row("answers to", ", ".join(f"{name} {gain:.2f}" for name, gain in _largest(plan.sensitivity())))
        table.add_row("", "percent off the step for one percent better")
        table.add_row("FSDP", f"{self.fsdp_step_s:.3f} s on the same cluster, as many layers recomputed")
        table.add_row("saved", self._savings())
        console.print(table)
        console.print()
        console.print(_memory_table(plan))
        fewest = (
            "none fits"
            if self.min_ckpt_layers is None
            else f"{self.min_ckpt_layers} of {llama.CONFIGS[o.model].layers}"
        )
        console.print(f"fewest layers that must recompute under zero3: {fewest}", highlight=False)
        if not plan.fits:
            console.print(
                f"does not fit: {plan.memory.why_not(plan.budget)}", style="red", markup=False, highlight=False
            )
        if self.found is not None:
            console.print()
            console.print(str(self.found), markup=False, highlight=False)

    def _savings(self) -> str:
        if self.saved <= 0:
            return f"nothing: {-100 * self.saved:.1f}% longer than FSDP"
        gpus, price = self.options.gpus * self.saved, self.options.gpu_hour_price
        dollars = f"${gpus * 24 * price:,.0f} a day at ${price:g} per GPU hour"
        return f"{100 * self.saved:.1f}%: the work of {gpus:.0f} of {self.options.gpus} GPUs, {dollars}"


def run(options: Options) -> Result:
    """Traces the model, plans its step, and simulates FSDP's beside it. Raises DoesNotFit where no choice fits."""
    config, where = llama.CONFIGS[options.model], cluster(options.cluster)
    budget = where.memory_bytes if options.memory_gib is None else int(options.memory_gib * 2**30)
    builder, words = schedules.parse(options.schedule)
    traced = _traced(options, config, axes(options.gpus, **_mesh(builder, options, where)), words.pop("chunk", 1))
    found = search(traced, where, memory=budget) if options.search else None
    least = min_ckpt_layers(traced, budget)
    if found is not None:
        program, name = found.program, str(found.best.point)
    else:
        recomputed = options.ckpt_layers
        if recomputed is None:
            recomputed = config.layers if least is None else least
        made = schedules.make(options.schedule, config.layers, remat=ya.remat.first(recomputed))
        program, name = made(traced), f"{options.schedule}, {recomputed} of {config.layers} layers recomputed"
        verify(program)
    plan = Plan.of(program, where, budget)
    if options.ckpt_layers is None:
        plan.check()
    again = {op.visit for op in program.ops if isinstance(op, Forward) and not op.keep}
    fsdp = peers.fsdp(remat=lambda trace: frozenset(again))(_traced(options, config, axes(options.gpus), 1))
    return Result(options, plan, simulate(fsdp, where).seconds, name, least, found)


def _traced(options: Options, config: llama.Config, mesh: tuple[tuple[str, int], ...], chunks: int) -> Trace:
    tokens = torch.empty((options.batch, options.seq_len), dtype=torch.int64, device="meta")
    return trace(
        llama.loss(config, chunks=chunks),
        llama.params(config),
        {"tokens": tokens, "targets": tokens},
        mesh=mesh,
        precision=PRECISIONS[options.reduce],
        microbatches=options.microbatches,
        tx=ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4)),
    )


def _mesh(builder: str, options: Options, where: Cluster) -> dict[str, int]:
    """What `ya.mesh` takes for a builder."""
    nodes = max(1, options.gpus // where.gpus_per_node)
    match builder:
        case "hsdp":
            return {"replicate": options.replicate or nodes}
        case "ddp":
            return {"replicate": options.gpus}
        case "hpz":
            return {"local": min(where.gpus_per_node, options.gpus)}
        case _:
            return {}


def _largest(gains: dict[str, float]) -> list[tuple[str, float]]:
    """The three figures that matter most."""
    return sorted(gains.items(), key=lambda item: -item[1])[:3]


def _memory_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", title="memory of a rank at its peak", pad_edge=False)
    table.add_column("item")
    table.add_column("GiB", justify="right")
    table.add_column("", justify="right")
    peak = max(plan.memory.peak_bytes, 1)
    for name, size in plan.memory.itemised().items():
        if size:
            table.add_row(
                name.replace("_", " ").replace("grad ", "gradient "), f"{size / 2**30:.2f}", f"{size / peak:.0%}"
            )
    table.add_section()
    table.add_row("peak", f"{plan.memory.peak_bytes / 2**30:.2f}", f"of {plan.budget / 2**30:.2f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own); returns the exit status."""
    errors = Console(stderr=True)
    try:
        options = tyro.cli(Options, args=argv, prog="python -m train plan", description=__doc__)
        result = run(options)
        if options.json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            result.show(Console())
        for path, write in (
            (options.timeline, result.plan.timeline.save),
            (options.perfetto, result.plan.timeline.perfetto),
        ):
            if path is not None:
                write(path)
                errors.print(f"wrote {path}", markup=False)
    except (ValueError, ModuleNotFoundError) as error:
        errors.print(f"plan: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0
