"""Compares any number of schedules, also of pipelines, in one table and one picture, in the same units.

    found = ya.planner.compare({"zero3": program, "1F1B": pipeline, "measured": timeline}, "a100-80g", tokens=131072)
    print(found)                        # step, bound, idle time, bytes, memory, tokens/s
    found.save("compare.png")           # all on one time axis

They should be of one step: the same parameters, the same rows over all ranks. Stages, microbatches, meshes differ.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.footprint import gib
from yafsdp_fn.planner.plan import Plan, with_picture
from yafsdp_fn.planner.simulate import proved
from yafsdp_fn.program.ops import ComputeOp
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import columns
from yafsdp_fn.timeline import paint, perfetto
from yafsdp_fn.timeline.spans import side_by_side
from yafsdp_fn.timeline.text import unit_of
from yafsdp_fn.timeline.timeline import Timeline


class ScheduleFigures(NamedTuple):
    """The figures of one schedule; None what is not known, such as the memory of a measured step.

    step_s: seconds of the step; bound_s: no order of the same ops is faster, and bound: by what; compute_s, comm_s:
    seconds in which computes run, and anything else, a mean over stages; idle: part of the step in which no compute
    runs. sent_bytes, peak_bytes: of a rank of the stage that has most; fits: into the memory of the cluster

    tokens_per_s: over all ranks, in the unit of the comparison
    """

    stages: int
    ranks: int
    microbatches: int
    step_s: float
    bound_s: float | None
    bound: str | None
    compute_s: float
    comm_s: float
    idle: float
    sent_bytes: int
    peak_bytes: int | None
    fits: bool | None
    tokens_per_s: float | None

    @staticmethod
    def of(timeline: Timeline, plan: Plan | None, tokens: int) -> "ScheduleFigures":
        trace = timeline.trace
        parts = timeline.by_stage
        programs = [Program(each.trace, tuple(span.op for span in each.spans)) for each in parts]
        return ScheduleFigures(
            timeline.stage_count,
            timeline.stage_count * trace.stage_ranks,
            trace.microbatches,
            timeline.seconds,
            plan and plan.work.seconds,
            plan and plan.bound,
            sum(each.compute_s for each in parts) / len(parts),
            sum(each.comm_s for each in parts) / len(parts),
            timeline.bubble,
            max(program.wire_bytes().total() for program in programs),
            plan and plan.memory.peak_bytes,
            plan and plan.fits,
            tokens / timeline.seconds if tokens and timeline.seconds else None,
        )


class Comparison(NamedTuple):
    """Schedules by name, in the order in which they were given.

    timelines: of each, simulated or measured; plans: of those that were not measured
    tokens: of one step, over all ranks, or rows (`unit`) where a batch is of something else; 0 where it is not known
    words: lines about them, below the table and the picture

    >>> both = {"zero2": ya.schedules.zero2()(trace), "zero3": ya.schedules.zero3()(trace)}
    >>> comparison = ya.planner.compare(both, "a100-80g")
    >>> sorted(comparison.ranked().rows), comparison.unit
    (['zero2', 'zero3'], 'tokens')
    """

    timelines: dict[str, Timeline]
    plans: dict[str, Plan]
    tokens: int = 0
    unit: str = "tokens"
    words: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, ScheduleFigures]:
        """The figures by name."""
        each = self.timelines.items()
        return {name: ScheduleFigures.of(timeline, self.plans.get(name), self.tokens) for name, timeline in each}

    def ranked(self) -> "Comparison":
        """Returns the same with the fastest first; those that do not fit into memory come last."""
        rows = self.rows
        order = sorted(rows, key=lambda name: (rows[name].fits is False, rows[name].step_s))
        return self._replace(timelines={name: self.timelines[name] for name in order})

    def save(self, path: str | Path) -> None:
        """Draws all on one time axis, under one another: a row for each stage. To a .png, .svg or .pdf.

        Raises ValueError for another suffix, ModuleNotFoundError without matplotlib."""
        paint.save(self._titled, path, self.words, by_stage=True)

    def perfetto(self, path: str | Path) -> None:
        """Writes all as trace events in JSON, which https://ui.perfetto.dev opens: a process for each stage."""
        perfetto.save(self._titled, path)

    @property
    def _titled(self) -> list[Timeline]:
        return [each._replace(title=name) for name, each in self.timelines.items()]

    @property
    def table(self) -> list[list[str]]:
        """The rows as text, headings first: each column in one unit, which its heading names."""
        rows = [*self.rows.values()]
        scale, time = unit_of(max(row.step_s for row in rows))
        after = 3 if time == "s" else 1
        size, memory = in_one_unit(max(max(row.sent_bytes, row.peak_bytes or 0) for row in rows))

        def column(field: str, unit: float = 1.0, digits: int = 0) -> list[str]:
            values = [getattr(row, field) for row in rows]
            return ["-" if value is None else f"{value / unit:,.{digits}f}" for value in values]

        figures = {
            "schedule": [*self.rows],
            "ranks": [
                f"{row.ranks}" if row.stages == 1 else f"{row.stages} x {row.ranks // row.stages}" for row in rows
            ],
            "microbatches": column("microbatches"),
            f"step, {time}": column("step_s", scale, after),
            f"bound, {time}": column("bound_s", scale, after),
            "bound by": [row.bound or "-" for row in rows],
            f"compute, {time}": column("compute_s", scale, after),
            f"communication, {time}": column("comm_s", scale, after),
            "idle, %": column("idle", 0.01, 1),
            f"sent, {memory}": column("sent_bytes", size, 2),
            f"peak, {memory}": column("peak_bytes", size, 2),
            f"{self.unit}/s": column("tokens_per_s"),
        }
        known = [[heading, *cells] for heading, cells in figures.items() if set(cells) != {"-"}]
        return [list(line) for line in zip(*known, strict=True)]

    @property
    def notes(self) -> list[str]:
        """Lines below the table: what does not fit, and how two timelines of one program differ."""
        found: list[str] = []
        if self.tokens:
            found.append(f"{self.tokens:,} {self.unit} a step")
        inside: dict[str, int] = {}
        for each in self.timelines.values():
            inside |= {axis: size for axis, size in each.trace.inside if size > 1}
        if inside:
            found.append(f"sent: without the collectives of blocks over {', '.join(inside)}")
        for name, plan in self.plans.items():
            if not plan.fits:
                found.append(f"does not fit into {gib(plan.budget)} GiB: {name}")
        first, *others = self.timelines
        for other in others:
            found += self._against(first, other)
        return found

    def _against(self, first: str, second: str) -> Iterator[str]:
        """Says how two timelines of one program differ; nothing of two programs."""
        one = self.timelines[first]
        two = self.timelines[second]
        if _computes(one) == _computes(two):
            parts = ", ".join(f"{what} {a / b - 1:+.1%}" for what, a, b in side_by_side(one, two) if b)
            yield f"{first} over {second}: {parts}"

    def __str__(self) -> str:
        """Returns the table, its units in a line of their own, the notes, and the words."""
        head, *rows = self.table
        named = [heading.partition(", ") for heading in head]
        names = [name for name, _, _ in named]
        units = [unit for _, _, unit in named]
        return "\n".join([*columns([names, units, *rows]), *self.notes, *self.words])

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.timelines)})"

    def _repr_html_(self) -> str:
        """Shown by a notebook: the table, and the picture where matplotlib is there."""
        drawn = b""
        with suppress(ModuleNotFoundError):
            drawn = paint.picture(self._titled, by_stage=True)
        return with_picture(str(self), drawn.decode(), "timelines")


def compare(
    schedules: Mapping[str, Program | Plan | Timeline],
    cluster: str | Cluster | None = None,
    *,
    tokens: int = 0,
    memory: int | None = None,
) -> Comparison:
    """Compares schedules of one step: what each takes, in one table and one picture.

    schedules: name -> a program, which is simulated on `cluster`; a `Plan`, which has a cluster of its own; or a
        timeline, simulated or measured
    tokens: of one step, over all ranks, where no plan says it; memory: bytes that a rank may fill, of programs, by
        default the cluster's

    Raises Refused for a program that `ya.verify` refuses; TypeError for anything else; ValueError for plans of other
    numbers of tokens.

    >>> both = {"zero2": ya.schedules.zero2()(trace), "zero3": ya.schedules.zero3()(trace)}
    >>> rows = ya.planner.compare(both, "a100-80g").rows
    >>> rows["zero2"].sent_bytes < rows["zero3"].sent_bytes    # print it: a table
    True
    """
    if not isinstance(schedules, Mapping) or not schedules or not all(isinstance(name, str) for name in schedules):
        raise TypeError('compare: expected programs, plans or timelines by name, such as {"zero3": program}')
    if tokens < 0:
        raise ValueError(f"compare: tokens={tokens}: expected the tokens of a step, or 0 where they are not known")
    timelines: dict[str, Timeline] = {}
    plans: dict[str, Plan] = {}
    for name, given in schedules.items():
        if isinstance(given, Program):
            given = _planned(name, given, cluster, memory)
        if isinstance(given, Plan):
            plans[name] = given
            given = given.timeline
        if not isinstance(given, Timeline):
            kind = f"a {type(given).__name__}"
            call = ""
            if callable(given):
                kind = "a function"
                call = ": call it on a trace, schedule(trace)"
            raise TypeError(f"compare: {name!r} is {kind}, no Program, Plan or Timeline{call}")
        timelines[name] = given
    if (cluster, memory) != (None, None) and not any(isinstance(given, Program) for given in schedules.values()):
        raise TypeError(
            "compare: a cluster and its memory are for programs, which it simulates; plans and timelines have their own"
        )
    return Comparison(timelines, plans, *_batch(plans, tokens))


def _batch(plans: Mapping[str, Plan], tokens: int) -> tuple[int, str]:
    """Returns the tokens of a step, and their unit. Raises ValueError where plans and `tokens` say several."""
    counted = {name: (plan.tokens, plan.unit) for name, plan in plans.items() if plan.tokens}
    said = {*counted.values()}
    if tokens:
        said.add((tokens, "tokens"))
    if len(said) > 1:
        each = ", ".join(f"{name} {number:,} {unit}" for name, (number, unit) in counted.items())
        raise ValueError(f"compare: expected steps of the same batch: {each}" + f", tokens={tokens:,}" * bool(tokens))
    return next(iter(said), (0, "tokens"))


def in_one_unit(nbytes: float) -> tuple[float, str]:
    """Returns the unit for a column whose largest value is `nbytes`, as `(its bytes, its name)`."""
    return (2**30, "GiB") if nbytes >= 2**27 else (2**20, "MiB")


def _computes(timeline: Timeline) -> dict[int | None, ComputeOp]:
    """Returns the computes of a timeline by their numbers: they tell programs apart."""
    return {span.number: span.op for span in timeline.spans if isinstance(span.op, ComputeOp)}


def _planned(name: str, program: Program, cluster: str | Cluster | None, memory: int | None) -> Plan:
    if cluster is None:
        raise TypeError(
            f'compare: {name!r} is a program; name the cluster to simulate it on: compare(..., "a100-80g"), or '
            "--cluster a100-80g on the command line"
        )
    proved(program, "compare")
    try:
        return Plan.of(program, cluster, memory)
    except ValueError as error:
        raise ValueError(f"compare: {name!r}: {error}") from error
