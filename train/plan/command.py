"""`python -m train plan`: options in, a table or JSON out, and the step as a picture."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import models
import yafsdp_fn as ya
from train.command_line import cli
from train.plan.step import YAFSDP, Options, over_axes, schedule_of, traced
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, Cluster, Comparison, Found, Plan, min_ckpt_layers, search, simulate
from yafsdp_fn.planner.cluster import cluster
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.timeline import Timeline
from yafsdp_fn.util.words import counted

PROGRAM = "python -m train plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own); returns the exit status.

    That is 2 where nothing fits, but for a number of recomputed layers that was asked for; the plan is shown even so.
    """
    errors = Console(stderr=True)
    try:
        options = cli(Options, argv, prog=PROGRAM)
        result = Compared.of(options) if options.schedules else run(options)
        if options.json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            result.show(Console())
        if options.timeline is not None:
            result.drawn.save(options.timeline)
        if options.perfetto is not None:
            result.drawn.perfetto(options.perfetto)
        for path in filter(None, (options.timeline, options.perfetto)):
            errors.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
        if options.ckpt_layers is None:
            result.check()
    except (ValueError, ModuleNotFoundError, OSError) as error:
        errors.print(f"plan: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


def run(options: Options) -> Result:
    """Traces the model, plans its step, and simulates others beside it. Raises DoesNotFit where a search finds none.

    On a100-80g FSDP and YaFSDP are as they were where they were published: on `peers.AS_RUN`.
    """
    config = models.CONFIGS[options.model]
    where = cluster(options.cluster)
    published = peers.AS_RUN if where is CLUSTERS["a100-80g"] else where
    flat = traced(dataclasses.replace(options, wire="none"), config, axes(options.gpus))
    found = None
    if options.search:
        traces = [*over_axes(options, config, where)]
        told = partial(print, file=sys.stderr, flush=True)
        found = search(traces, where, memory=options.budget, synthesize=options.synthesize, report=told)
    here, factory = schedule_of(options, config, where, options.schedule)
    least = min_ckpt_layers(here, options.budget, factory)
    recomputed = options.ckpt_layers
    if recomputed is None:
        recomputed = config.layers if least is None else least
    again = ya.schedules.remat.first(recomputed)
    if found is not None:
        program = found.program
        name = f"{found.best.point}{', and from it by synthesis' * (found.synthesized is not None)}"
    else:
        words = [*options.mesh.words, options.schedule]
        program = factory(remat=again)(here)
        name = f"{', '.join(words)}, {recomputed} of {config.layers} layers recomputed"
    plan = Plan.of(program, published if options.schedule == YAFSDP else where, options.budget)._replace(
        tokens=options.tokens
    )
    others = {
        "fsdp": simulate(peers.fsdp(remat=again)(flat), published),
        "fsdp2": simulate(peers.fsdp2(remat=again)(flat), where),
        "yafsdp": simulate(peers.yafsdp(remat=again)(flat), published),
        "zero3": simulate(ya.schedules.zero3(remat=again)(flat), where),
    }
    return Result(options, plan, name, others, recomputed, least, found)


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
        return self.options.tokens

    @property
    def flat_tokens(self) -> int:
        """Tokens of a step of the others, in which every rank has sequences of its own."""
        return self.options.gpus * self.options.batch * self.options.seq_len

    @property
    def drawn(self) -> Timeline | Comparison:
        """The step, of which pictures are; where one was written, it and the best builder's."""
        if self.found is not None and self.found.synthesized is not None:
            return self.found.compared(self.tokens)
        return self.plan.timeline

    def check(self) -> None:
        """Raises DoesNotFit where the step does not fit."""
        self.plan.check()

    def saved(self, other: str) -> float:
        """The part of another schedule's GPU hours that the same tokens do without.

        Like with like: what nothing explains of published runs is in neither.
        """
        ours, theirs = (each.seconds - each.overhead for each in (self.plan.timeline, self.others[other]))
        return 1 - ours / theirs * (self.flat_tokens / self.tokens)

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
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
            **{f"{other}_step_s": timeline.seconds for other, timeline in self.others.items()},
            "unexplained_s": {other: timeline.overhead for other, timeline in self.others.items()},
            "compute_s": plan.work.compute_s,
            "comm_s": plan.work.comm_s,
            "overhead_s": plan.work.overhead_s,
            "bound": plan.bound,
            "headroom": plan.headroom,
            "least_s": plan.least.seconds,
            "least_by": plan.least.by,
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens / plan.step_s,
            "saved": {other: self.saved(other) for other in self.others},
            "peak_bytes": plan.memory.peak_bytes,
            "budget_bytes": plan.budget,
            "fits": plan.fits,
            "why_not": plan.memory.why_not(plan.budget),
            "memory": plan.memory.itemised(),
            "min_ckpt_layers": self.min_ckpt_layers,
        }

    def show(self, console: Console) -> None:
        """Prints the result for people."""
        options = self.options
        plan = self.plan
        config = models.CONFIGS[self.options.model]

        def line(text: object, **style: Any) -> None:
            console.print(str(text), markup=False, highlight=False, soft_wrap=True, **style)

        _heading(console, options, plan.cluster)
        line(f"{self.schedule}: {self.tokens / plan.step_s / options.gpus:,.0f} tokens/s a {_device(plan.cluster)}")
        line(plan)
        line("")
        console.print(self._others())
        doubt = '; "saved" leaves out what is unexplained' * (self.others["yafsdp"].overhead > 0)
        line(f"as fitted: to published times{doubt}\n")
        fewest = "not even all fit" if self.min_ckpt_layers is None else f"{self.min_ckpt_layers} of {config.layers}"
        line(f"fewest layers that must recompute with {options.schedule}: {fewest}")
        if not plan.fits and options.ckpt_layers is not None:  # else it is the command's error
            line(f"does not fit: {plan.memory.why_not(plan.budget)}", style="red")
        if self.found is not None:
            line(f"\nsearched for the same {self.tokens:,} tokens a step")
            line(dataclasses.replace(self.found, synthesized=None))
            drawn = self.drawn
            if isinstance(drawn, Comparison):
                line(f"\n{drawn}")

    def _others(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column(f"others, {counted(self.recomputed, 'layer')} recomputed")
        for heading in ("step, s", "tokens/s", "saved"):
            table.add_column(heading, justify="right")
        for other, timeline in self.others.items():
            doubt = f", {timeline.overhead:.2f} s unexplained" if timeline.overhead else ""
            rate = f"{self.flat_tokens / timeline.seconds:,.0f}"
            table.add_row(OTHERS[other] + doubt, f"{timeline.seconds:.3f}", rate, f"{self.saved(other):.1%}")
        return table


def _device(where: Cluster) -> str:
    """Names what a rank runs on: a laptop has ranks and no GPUs, and nobody pays for its hours."""
    return "rank" if where.host_computes else "GPU"


def _heading(console: Console, options: Options, where: Cluster) -> None:
    """Prints what the step is of."""
    numel = models.CONFIGS[options.model].num_parameters
    inside = options.mesh.words
    shared = f"for {' x '.join(inside)} ranks" if inside else "a rank"
    size = f"{numel / 1e9:.1f}B" if numel > 1e8 else f"{numel / 1e6:.1f}M"
    console.print(
        f"[bold]{options.model}[/], {size} parameters, on {counted(options.gpus, _device(where))} "
        f"({where.name}); {options.batch} x {options.seq_len} tokens {shared}, {options.tokens:,} a step\n",
        highlight=False,
        soft_wrap=True,
    )


@dataclasses.dataclass(frozen=True)
class Compared:
    """Several schedules of one step, the fastest first. "recomputed" in a name: so many first layers, of each stage"""

    options: Options
    drawn: Comparison

    @staticmethod
    def of(options: Options) -> Compared:
        """Plans each of --schedules, with as few recomputed layers as fit where their number is not given."""
        config = models.CONFIGS[options.model]
        where = cluster(options.cluster)
        programs: dict[str, ya.Program] = {}
        for name in options.schedules:
            here, factory = schedule_of(options, config, where, name)
            recomputed = options.ckpt_layers
            if recomputed is None:
                recomputed = min_ckpt_layers(here, options.budget, factory)
            if recomputed is None:  # not even all fit
                recomputed = config.layers
            words = f", {recomputed} recomputed" * (recomputed > 0)
            programs[name + words] = factory(remat=ya.schedules.remat.first(recomputed))(here)
        found = ya.planner.compare(programs, where, tokens=options.tokens, memory=options.budget)
        return Compared(options, found.ranked())

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.options.model,
            "gpus": self.options.gpus,
            "cluster": cluster(self.options.cluster).name,
            "tokens_per_step": self.options.tokens,
            "schedules": {name: row._asdict() for name, row in self.drawn.rows.items()},
        }

    def show(self, console: Console) -> None:
        """Prints the table for people."""
        _heading(console, self.options, cluster(self.options.cluster))
        console.print(str(self.drawn), markup=False, highlight=False, soft_wrap=True)

    def check(self) -> None:
        """Raises DoesNotFit where none of them fits."""
        if not any(plan.fits for plan in self.drawn.plans.values()):
            min(self.drawn.plans.values(), key=lambda plan: plan.memory.peak_bytes).check()
