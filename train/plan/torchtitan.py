"""`python -m train plan --torchtitan FILE.toml`: the step that a torchtitan job runs, and the fastest of this toolkit.

proved        the program that the job runs (job.py)
predicted     with the copies of FSDP2's code
searched      for the same sequences a step: without stages, over tensor and context; and on the job's own stages
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import yafsdp_fn as ya
from train.plan.job import MOST_RUNS, Job, modules_of, read
from train.plan.step import Options, doubling
from yafsdp_fn.interop import Actions, to_actions
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Cluster, Comparison, DoesNotFit, Found, Plan, compare, search
from yafsdp_fn.planner.cluster import cluster
from yafsdp_fn.schedules import Trace
from yafsdp_fn.util.words import counted

ON_STAGES = "its stages"
ALONE = "no stages"
"""Names of what is searched for."""


def run(options: Options) -> Result:
    """The step that the file's job runs, proved and predicted, and the fastest of this toolkit for the same tokens."""
    assert options.torchtitan is not None
    job = read(options.torchtitan, options.gpus)
    where = cluster(options.cluster)
    if options.csv is not None and job.stages == 1:
        raise ValueError(f"--csv {options.csv}: {job.path} has no stages: pipeline_parallel_degree is 1")
    budget = where.memory_bytes if options.memory_gib is None else int(options.memory_gib * 2**30)
    own = job.own()
    proved = ya.verify(job.schedule()(own))
    plan = Plan.of(job.schedule(peers.fsdp2)(own), where, budget)._replace(tokens=job.tokens)
    searched = {ALONE: _searched(job, where, budget), ON_STAGES: _searched_on_stages(job, where, budget)}
    found = {name: each for name, each in searched.items() if each is not None}
    result = Result(job, own, proved, plan, dict(sorted(found.items(), key=lambda item: item[1].best.step_s)))
    if options.csv is not None:
        result.exported().save(options.csv)
    return result


def _searched(job: Job, where: Cluster, budget: int) -> Found | None:
    """The fastest schedule of this toolkit for the step of `job`, without stages: over tensor and context where they
    fit the model, in microbatches of a sequence, or of as many as the file's. None where nothing fits."""
    found: list[Found] = []
    for rows in sorted({1, job.rows}):
        with suppress(DoesNotFit):
            if traces := [*_over_axes(job, where, rows)]:
                found.append(search(traces, where, memory=budget))
    return min(found, key=lambda each: each.best.step_s, default=None)


def _searched_on_stages(job: Job, where: Cluster, budget: int) -> Found | None:
    """The fastest on the stages of `job`, over its axes; None where it has none, or nothing fits."""
    if job.stages > 1:
        with suppress(DoesNotFit):
            own = job.traced(job.context, job.tensor, job.rows, job.runs, job.gpus // job.stages)
            return search(own, where, memory=budget, stages=(job.stages,), ranks=job.gpus)
    return None


def _over_axes(job: Job, where: Cluster, rows: int) -> Iterator[Trace]:
    """The step of `job` over tensor and context, in microbatches of so many sequences."""
    for tensor, context in itertools.product(doubling(min(where.gpus_per_node, job.gpus)), sorted({1, job.context})):
        microbatches, left = divmod(job.sequences * tensor * context, job.gpus * rows)
        if 0 < microbatches <= MOST_RUNS and not left:
            with suppress(ValueError, NotImplementedError):  # what does not divide, and families without a split
                yield job.traced(context, tensor, rows, microbatches, job.gpus)


@dataclasses.dataclass(frozen=True)
class Result:
    """A job's step. trace: on its own mesh; proved: the program, without FSDP2's copies, that `plan` is of.

    found: the fastest without stages, and with those of the file, by name; the faster first
    """

    job: Job
    trace: Trace
    proved: ya.schedules.Program
    plan: Plan
    found: dict[str, Found]

    def exported(self) -> Actions:
        """The rows of the fastest pipeline on the file's stages, for torchtitan. Raises ValueError where none fits."""
        if ON_STAGES not in self.found:
            raise ValueError(f"{self.job.path}: no schedule of {self.job.stages} stages fits: there is none to write")
        return to_actions(self.found[ON_STAGES].program)

    @property
    def plans(self) -> dict[str, Plan]:
        """The step of the file, and what was found, by name."""
        where = self.plan.cluster
        budget = self.plan.budget
        found = {f"found, {name}": Plan.of(each.program, where, budget) for name, each in self.found.items()}
        return {"the file": self.plan, **{n: plan._replace(tokens=self.job.tokens) for n, plan in found.items()}}

    @property
    def drawn(self) -> Comparison:
        """The file's step, and what was found, of which pictures are."""
        return compare(self.plans)

    def check(self) -> None:
        """Raises DoesNotFit where the file's step does not."""
        self.plan.check()

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        job = self.job
        return {
            "file": str(job.path),
            "model": job.model,
            "gpus": job.gpus,
            "cluster": plan.cluster.name,
            "mesh": dict(self.trace.mesh),
            "tokens_per_step": job.tokens,
            "ops": sum(map(len, self.proved.stages)),
            "step_s": plan.step_s,
            "tokens_per_second": plan.tokens_per_s,
            "compute_s": plan.work.compute_s,
            "comm_s": plan.work.comm_s,
            "bound": plan.bound,
            "peak_bytes": plan.memory.peak_bytes,
            "budget_bytes": plan.budget,
            "fits": plan.fits,
            "best": {
                name: {"schedule": str(each.best.point), "step_s": each.best.step_s, "peak_bytes": each.best.peak_bytes}
                for name, each in self.found.items()
            },
            "not_modelled": list(job.not_modelled),
        }

    def show(self, console: Console) -> None:
        """Prints the result for people."""
        job = self.job
        plan = self.plan

        def line(text: str = "", **style: Any) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True, **style)

        axes = ", ".join(f"{name} {size}" for name, size in self.trace.mesh if size > 1)
        numel = job.config.num_parameters / 1e9
        gpus = counted(job.gpus, "GPU")
        line(f"{job.path}: {job.model}, {numel:.1f}B parameters, on {gpus} ({plan.cluster.name}): {axes}")
        stages = f"; {job.csv or job.order}, {counted(job.runs, 'microbatch')}" * (job.stages > 1)
        line(f"{counted(job.sequences, 'sequence')} of {job.seq_len} tokens a step; {job.checkpointed}{stages}\n")
        ops = sum(map(len, self.proved.stages))
        parts = self.proved.by_stage
        kinds = ya.schedules.Gather, ya.schedules.Reduce
        gathers, reductions = (sum(part.count(kind) for part in parts) for kind in kinds)
        both = f"{counted(gathers, 'gather')} and {counted(reductions, 'reduction')}"
        line(f"proved: its program of {ops} ops, with {both}, is right")
        line(f"bound by {plan.bound_in_words}; {plan.headroom_in_words} of the step\n")
        console.print(self._table())
        if not self.found:
            line(f"nothing of this toolkit fits into {plan.budget / 2**30:.1f} GiB", style="red")
        for name, found in self.found.items():
            line(f"{name}: {found.best.point}")
        if ON_STAGES in self.found:
            line("\nin torchtitan, with --csv as the file of rows:")
            for setting in _settings(self.found[ON_STAGES]):
                line(f"  {setting}")
            for left in self.exported().left_out:
                line(f"  not in the rows: {left}")
        line("\nnot modelled:" if job.not_modelled else "\nall that the file says of a step is modelled")
        for each in job.not_modelled:
            line(f"  {each}")

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("predicted")
        for heading in ("step, s", "tokens/s", "a GPU", "saved", "computes idle", "GiB"):
            table.add_column(heading, justify="right")
        for name, plan in self.plans.items():
            rate = plan.tokens_per_s
            saved = 1 - plan.step_s / self.plan.step_s
            cells = [f"{plan.step_s:.3f}", f"{rate:,.0f}", f"{rate / self.job.gpus:,.0f}"]
            cells += [f"{saved:.1%}" if saved else "", f"{plan.timeline.bubble:.1%}"]
            table.add_row(name, *cells, f"{plan.memory.peak_bytes / 2**30:.1f}")
        return table


def _settings(found: Found) -> Iterator[str]:
    """Settings of torchtitan, for stages as `found` has them."""
    order = found.best.point.order
    split = found.program.trace.split
    assert order is not None and split is not None
    v = split.homes != (*range(split.stages),) * order.per_stage
    like = "ZBVZeroBubble" if v else "1F1B" if order.per_stage == 1 else "Interleaved1F1B"
    yield f'pipeline_parallel_schedule = "{like}"' + "  # for where its segments lie: the rows are the file's"
    parts: list[list[str]] = []
    for first, end in split.segments:
        parts.append([name for visit in found.program.trace.visits[first:end] for name in modules_of(visit.name)])
    yield f"module_fqns_per_model_part = {json.dumps(parts)}"
