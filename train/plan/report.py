"""A plan as JSON and for people."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import models
from train.plan.options import Options
from yafsdp_fn.planner import Found, Plan
from yafsdp_fn.planner.footprint import words
from yafsdp_fn.planner.plan import PARTS
from yafsdp_fn.timeline import Timeline

OTHERS = {
    "fsdp": "FSDP as fitted",
    "fsdp2": "FSDP2, its copies as its code has them",
    "yafsdp": "YaFSDP as fitted",
    "zero3": "zero3: two communicators, no copies",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What there is to say. others: the step of other schedules, with `recomputed` layers recomputed."""

    options: Options
    plan: Plan
    schedule: str
    others: dict[str, Timeline]
    recomputed: int
    min_ckpt_layers: int | None
    found: Found | None

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.options.gpus * self.options.batch * self.options.seq_len

    def saved(self, other: str) -> float:
        """The part of another schedule's GPU hours that the same tokens do without.

        Like with like: what nothing explains of published runs is in neither.
        """
        ours, theirs = (each.seconds - each.overhead for each in (self.plan.timeline, self.others[other]))
        return 1 - ours / theirs

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
        """The same for people."""
        options, plan, config = self.options, self.plan, models.CONFIGS[self.options.model]
        numel = config.num_parameters
        size = f"{numel / 1e9:.1f}B" if numel > 1e8 else f"{numel / 1e6:.1f}M"
        console.print(
            f"[bold]{options.model}[/], {size} parameters, on {options.gpus} GPUs "
            f"({plan.cluster.name}); {options.batch} x {options.seq_len} tokens a rank, {self.tokens:,} a step\n",
            highlight=False,
            soft_wrap=True,
        )
        console.print(self._time(), "", self._others(), sep="\n")
        doubt = '; "this saves" leaves out what is unexplained' * (self.others["yafsdp"].overhead > 0)
        console.print(f"as fitted: to published times{doubt}\n", highlight=False)
        console.print(_memory(plan), "", sep="\n")
        fewest = "not even all fit" if self.min_ckpt_layers is None else f"{self.min_ckpt_layers} of {config.layers}"
        console.print(f"fewest layers that must recompute with {self.options.schedule}: {fewest}", highlight=False)
        if not plan.fits and options.ckpt_layers is not None:  # else it is the command's error
            why = f"does not fit: {plan.memory.why_not(plan.budget)}"
            console.print(why, style="red", markup=False, highlight=False, soft_wrap=True)
        if self.found is not None:
            console.print(f"\n{self.found}", markup=False, highlight=False, soft_wrap=True)

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
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(f"others, {self.recomputed} layers recomputed")
        for heading in ("step, s", "this saves", "GPUs", "$ a day"):
            table.add_column(heading, justify="right")
        for other, timeline in self.others.items():
            part = self.saved(other)
            spared = (f"{100 * part:.1f}%", f"{round(part * self.options.gpus)}", f"{round(self._dollars(other)):,}")
            doubt = f", {timeline.overhead:.2f} s unexplained" if timeline.overhead else ""
            table.add_row(OTHERS[other] + doubt, f"{timeline.seconds:.3f}", *spared)
        return table

    def _dollars(self, other: str) -> float:
        """That a day of the same tokens costs less."""
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
