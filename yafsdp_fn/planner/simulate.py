"""A discrete-event simulation of a program on a cluster: every stream in order, every wait as the scoreboard has it.

An op begins when the op before it on its stream and all that it must wait for have ended. Between two events all
running phases progress at constant rates:

    compute           1, or 1 / (1 + contention) while another stream runs something
    node, network     1 / k while k streams use that link
    memory, host, latency   1

A program without updates is followed by the norm and one update of all units, as in a step. The stages of a pipeline
are simulated together (stages.py).

Shared links and contention allow for anomalies: a faster part may begin something earlier that then slows the critical
path. For programs of the builders with gathers and reductions alone none has been seen; with all-reduces beside them,
or sums over several links, 12 in 80,000 random cases, of 1.4% at most.
"""

from collections.abc import Mapping, Sequence
from typing import overload

from yafsdp_fn.planner import stages
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.events import Events, Task
from yafsdp_fn.planner.tasks import overhead, tasks
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.timeline.spans import Span
from yafsdp_fn.timeline.stages import PipelineTimeline
from yafsdp_fn.timeline.timeline import Timeline


@overload
def simulate(
    program: Program,
    cluster: str | Cluster,
    *,
    ranks: int | None = None,
    durations: Mapping[int, float] = {},
    title: str = "",
) -> Timeline: ...


@overload
def simulate(
    program: Pipeline, cluster: str | Cluster, *, durations: Sequence[Mapping[int, float]] = (), title: str = ""
) -> PipelineTimeline: ...


def simulate(
    program: Program | Pipeline,
    cluster: str | Cluster,
    *,
    ranks: int | None = None,
    durations: Mapping[int, float] | Sequence[Mapping[int, float]] = (),
    title: str = "",
) -> Timeline | PipelineTimeline:
    """The timeline of one step; of a pipeline, of all its stages on one time axis.

    ranks: that the same ops run on, each with the same batch, instead of the program's; its mesh must have one axis
    durations: op number -> seconds alone, measured, instead of what the cluster's figures say; of a pipeline, for each
        stage
    Raises ValueError for an unknown cluster, ranks that do not fill its nodes, a trace without costs, and an op that
    takes forever or less than nothing.
    """
    where = named(cluster)
    if isinstance(program, Pipeline):
        if ranks is not None:
            raise TypeError("simulate: ranks is of a program without stages; build the pipeline on another mesh")
        return stages.run(program, stages.tasks_of(program, where, _of_stages(durations)), where, title)
    if not isinstance(program, Program):
        raise TypeError(f"simulate: expected a Program, got {type(program).__name__}: Program(trace, ops)")
    program = program if ranks is None else _on(program, ranks)
    world = program.trace.ranks * program.trace.replicas
    made = tasks(program, where, durations if isinstance(durations, Mapping) else {})
    return run(program, made, where, title or f"simulated on {where.name}, {world} rank{'s' * (world > 1)}")


def _of_stages(durations: Mapping[int, float] | Sequence[Mapping[int, float]]) -> Sequence[Mapping[int, float]]:
    if isinstance(durations, Mapping):
        raise TypeError("simulate: durations of a pipeline are a list, of a mapping for each stage")
    return durations


def _on(program: Program, ranks: int) -> Program:
    if len(program.trace.mesh) > 1 or ranks < 1:
        raise ValueError(
            f"simulate(ranks={ranks}): the program's mesh is {program.trace.mesh}; expected one axis, and ranks >= 1. "
            "For another mesh build the schedule's program on trace.on(mesh)"
        )
    return program._replace(trace=program.trace.on(((program.trace.mesh[0][0], ranks),)))


def run(program: Program, todo: list[Task], cluster: Cluster, title: str) -> Timeline:
    """Runs the tasks; O(ops) events, of at most one running op per stream each."""
    times = Events(todo, cluster.contention).play()
    spans = tuple(
        Span(number, task.op, task.stream, *at)  # type: ignore[arg-type]
        for number, (task, at) in enumerate(zip(todo, times, strict=True))
    )
    after, end = overhead(program, cluster), max((at.end for at in times), default=0.0)
    return Timeline(program.trace, spans, end + after, title, after)
