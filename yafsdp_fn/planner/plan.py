"""`Plan`: the time and the memory of a program on a cluster, before any machine is rented."""

import base64
from typing import NamedTuple

from yafsdp_fn.planner import footprint
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.footprint import gib
from yafsdp_fn.planner.simulate import Work, proved, run, tasks, work
from yafsdp_fn.program.measured import KERNELS
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import in_notebook
from yafsdp_fn.program.trace import Trace, shortened
from yafsdp_fn.timeline.text import shown
from yafsdp_fn.timeline.timeline import Timeline
from yafsdp_fn.util.mesh_axes import CONTEXT, MeshAxes, check_inside, mesh_sizes
from yafsdp_fn.util.words import counted

PARTS = ("compute", "communication", "overhead")


RANGE = (0.8, 1.18)
"""Between these parts of a predicted time are four fifths of 161 published runs, each with its source left out of the
fit, sources counting alike: `python -m benchmarks published --sources`."""
RESERVED = (1.02, 1.41)
"""Between these parts of tensors' peak was what nvidia-smi showed of a process, in four fifths of twelve published runs
on one GPU (docs/benchmarks/published_runs.csv): torch keeps more memory than tensors have, and CUDA has its context."""


class DoesNotFit(ValueError):
    """A step needs more memory than a rank has; says which items are too large and what would fit."""


class Plan(NamedTuple):
    """One program on one cluster.

    timeline: simulated; memory: predicted, of each rank; budget: bytes that a rank may fill; work: without any waiting
    stages: memory of the ranks of each stage; `memory` is that of the stage that takes most
    tokens: of one step, over all ranks, or rows (`unit`) where a batch is of something else; 0 where it is not known.
        Times of two plans can be compared as tokens a second: with stages fewer ranks read a batch of their own

    >>> plan = ya.planner.plan(loss_fn, params, batch, tx=tx, ranks=8, cluster="a100-80g")
    >>> plan.fits, plan.bound
    (True, 'communication')
    """

    program: Program
    cluster: Cluster
    timeline: Timeline
    memory: footprint.Memory
    budget: int
    work: Work
    stages: tuple[footprint.Memory, ...] = ()
    tokens: int = 0
    unit: str = "tokens"

    @staticmethod
    def of(program: Program, cluster: str | Cluster, memory: int | None = None) -> "Plan":
        """Returns the plan of a program, which is proved first.

        memory: the budget in bytes per rank, by default the cluster's `memory_bytes`
        """
        where = named(cluster)
        program = proved(program, "Plan.of")
        each = tuple(footprint.predict_memory(part) for part in program.by_stage)
        most = max(each, key=lambda one: one.peak_bytes)
        todo = tasks(program, where)
        return Plan(
            program, where, run(program, todo, where), most, where.budget(memory), work(program, todo, where), each
        )

    @property
    def step_s(self) -> float:
        return self.timeline.seconds

    @property
    def range_s(self) -> tuple[float, float]:
        """The seconds between which four steps of five should lie."""
        return self.step_s * RANGE[0], self.step_s * RANGE[1]

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks, in `unit`s; 0 where `tokens` is not known."""
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def bound(self) -> str:
        """ "compute" or "communication": what a perfect schedule of the same ops would still take."""
        return self.work.bound

    @property
    def headroom(self) -> float:
        """The part of the step that a perfect overlap would save, and with stages one without a bubble."""
        return 1 - self.work.seconds / self.step_s

    @property
    def headroom_in_words(self) -> str:
        """Returns what a perfect overlap would save, or across stages what bubble and waits take, in words."""
        part = f"{100 * self.headroom:.1f}%"
        one = self.timeline.stage_count == 1
        return f"a perfect overlap would save {part}" if one else f"bubble and waits take {part}"

    @property
    def least(self) -> Bound:
        """The bound that no program of this step falls below, on this mesh and these stages, within the budget."""
        return bound(self.program.trace, self.cluster, self.budget)

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """The bytes between which a process with this peak is, counted from outside: `RESERVED`."""
        low, high = (int(part * self.memory.peak_bytes) for part in RESERVED)
        return low, high

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.budget

    def check(self) -> "Plan":
        """This plan, if it fits. Raises DoesNotFit: the largest item, and what would fit."""
        if not self.fits:
            raise DoesNotFit(self.memory.why_not(self.budget))
        return self

    def __str__(self) -> str:
        rate = self.tokens_per_s
        span = " to ".join(map(shown, self.range_s))
        counted = f" of {self.tokens:,} {self.unit}" if self.tokens else ""
        speed = ""
        if rate:
            number = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            speed = f": {number} {self.unit}/s"
        alone = ", ".join(f"{name} {shown(seconds, 4)}" for name, seconds in zip(PARTS, self.work, strict=True))
        # a figure of the cluster without a known cause: said if it takes a tenth of the step
        unknown = self.work.overhead_s / self.step_s if self.step_s else 0.0
        doubt = f" and, for {unknown:.0%} of the step, by an overhead that nothing explains (unit_overhead)"
        lines = [
            f"{shown(self.step_s, 4)} ({span}) a step{counted} on {self.cluster.name}{speed}",
            f"alone: {alone}",
            f"bound by {self.bound}{doubt * (unknown > 0.1)}; {self.headroom_in_words} of the step",
            self.least.against(self.step_s),
            f"beside products and attention: {KERNELS[self.program.trace.kernels]}",
            *self._stages(),
            str(self.memory),
            f"{'fits' if self.fits else 'does NOT fit'} into {gib(self.budget)} GiB of tensors; a process holds "
            + " to ".join(map(gib, self.reserved_bytes))
            + " GiB",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        fits = f"{gib(self.memory.peak_bytes)} of {gib(self.budget)} GiB"
        return f"Plan({shown(self.step_s, 4)} a step on {self.cluster.name}, bound by {self.bound}, {fits})"

    def _repr_html_(self) -> str:
        """Shown by a notebook: its words, and the picture of its timeline where matplotlib is there."""
        return with_picture(str(self), self.timeline._repr_svg_() or "", "timeline")

    def _stages(self) -> list[str]:
        """Returns the lines on several stages: their bubble and why, and what each stage does and takes."""
        if self.timeline.stage_count == 1:
            return []
        seconds = self.timeline.seconds or 1.0
        rows = [
            f"stage {number:<4}{own.compute_s / seconds:>5.0%} busy {gib(each.peak_bytes):>8} GiB"
            for number, (own, each) in enumerate(zip(self.timeline.by_stage, self.stages, strict=True))
        ]
        most = self.stages.index(self.memory)
        microbatches = counted(self.program.trace.microbatches, "microbatch")
        head = f"{len(rows)} stages, {microbatches}: bubble {self.timeline.bubble:.1%}"
        return [head, *shortened(rows), f"memory of stage {most}, which takes most:"]


def with_picture(text: str, svg: str, alt: str) -> str:
    """Text and a picture as HTML, the text alone where there is no picture."""
    data = base64.b64encode(svg.encode()).decode()
    return in_notebook(text) + f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}">' * bool(svg)


def read_by(trace: Trace) -> int:
    """Returns the ranks of a stage with tokens of their own: all but those that differ on `tensor` or an axis of the
    user's."""
    return trace.batch_ranks * dict(trace.inside).get(CONTEXT, 1)


def axes(ranks: int, replicate: int | None = None, local: int | None = None, **inside: int) -> MeshAxes:
    """Returns `Trace.mesh` of what `ya.mesh(replicate=replicate, local=local, tensor=...)` makes of so many ranks."""
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected the number of GPUs, 1 or more")
    check_inside(inside)
    return tuple(mesh_sizes(ranks, inside, replicate=replicate, local=local).items())
