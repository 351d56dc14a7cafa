"""The stages of a pipeline in simulation, all on one time axis.

    stage 0    F0 F1 F2 F3          B0    B1    B2    B3        compute
                 \\                 /
    stage 1        F0          B0                               a send and its receive are one transfer

The tasks of all stages are one list. What ties stages together: transfers, which begin when both ends have come to them
and are over at both together; the gradients of units that stages share, which all of them sum up; and the norm of the
whole gradient, which the updates of every stage wait for.
"""

from collections.abc import Mapping, Sequence

from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.costs import link
from yafsdp_fn.planner.events import Events, Task, Times
from yafsdp_fn.planner.tasks import check_costs, overhead, tasks
from yafsdp_fn.schedules.further_ops import AllReduce, Receive, Send
from yafsdp_fn.schedules.ops import Norm, Update
from yafsdp_fn.schedules.split import Parcel
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.timeline.spans import Span
from yafsdp_fn.timeline.stages import PipelineTimeline
from yafsdp_fn.timeline.stages_spans import Crossing
from yafsdp_fn.timeline.timeline import Timeline


def tasks_of(pipeline: Pipeline, cluster: Cluster, durations: Sequence[Mapping[int, float]] = ()) -> list[Task]:
    """The tasks of all stages, one stage after the other. durations: of each stage, as `simulate` takes them.

    Raises ValueError for a step without costs, stages that do not lie evenly on nodes, a message without its other end.
    """
    if not durations:
        check_costs(pipeline.trace)
    _check_places(pipeline, cluster)
    out: list[Task] = []
    for stage, program in enumerate(pipeline.stages):
        first = len(out)
        for task in tasks(program, cluster, durations[stage] if durations else {}):
            out.append(task._replace(stage=stage, waits=tuple(first + wait for wait in task.waits)))
    return _joined(_after_all_sums(_after_all_norms(out)))


def _check_places(pipeline: Pipeline, cluster: Cluster) -> None:
    trace, node = pipeline.stages[0].trace, cluster.gpus_per_node
    width = trace.ranks * trace.replicas
    world = width * len(pipeline.stages)
    if (width % node and node % width) or (world > node and world % node):
        raise ValueError(
            f"{len(pipeline.stages)} stages of {width} ranks do not lie evenly on nodes of {node} GPUs "
            f"({cluster.name}): a stage takes whole nodes, or a node whole stages"
        )


def _joined(todo: Sequence[Task]) -> list[Task]:
    """Sends and receives with their partners."""
    ends: dict[Parcel, dict[type, int]] = {}
    for number, task in enumerate(todo):
        if isinstance(task.op, Send | Receive):
            ends.setdefault(task.op.parcel, {})[type(task.op)] = number
    out = list(todo)
    for parcel, both in ends.items():
        if len(both) < 2:
            alone = todo[next(iter(both.values()))]
            other = "receives" if isinstance(alone.op, Send) else "sends"
            raise ValueError(f"stage {alone.stage}: {alone.op}, but nobody {other} that ({parcel}): verify says more")
        for one, two in (both[Send], both[Receive]), (both[Receive], both[Send]):
            out[one] = out[one]._replace(partner=two)
    return out


def _after_all_norms(todo: Sequence[Task]) -> list[Task]:
    """Updates after the norm of their stage wait for those of all stages."""
    norms = {task.stage: number for number, task in enumerate(todo) if isinstance(task.op, Norm)}

    def waits(number: int, task: Task) -> tuple[int, ...]:
        after = isinstance(task.op, Update) and number > norms.get(task.stage, number)
        others = [norm for stage, norm in norms.items() if stage != task.stage]
        return (*task.waits, *others) if after else task.waits

    return [task._replace(waits=waits(number, task)) for number, task in enumerate(todo)]


def _after_all_sums(todo: Sequence[Task]) -> list[Task]:
    """What waits for the sum of a unit's gradient over the stages that share it waits for all of them."""
    sums: dict[tuple[int, ...], list[int]] = {}
    for number, task in enumerate(todo):
        if isinstance(task.op, AllReduce) and task.op.over == "stages":
            sums.setdefault(task.op.units, []).append(number)
    others = {number: numbers for numbers in sums.values() for number in numbers}
    return [
        task._replace(waits=(*dict.fromkeys(other for wait in task.waits for other in others.get(wait, [wait])),))
        for task in todo
    ]


def run(pipeline: Pipeline, todo: Sequence[Task], cluster: Cluster, title: str = "") -> PipelineTimeline:
    """Runs the tasks of all stages together. Raises ValueError where they wait for each other for ever."""
    times = Events(todo, cluster.contention).play()
    overheads = [overhead(program, cluster) for program in pipeline.stages]
    seconds = max((at.end for at in times), default=0.0) + max(overheads)
    trace = pipeline.stages[0].trace
    width = trace.ranks * trace.replicas
    title = title or (
        f"simulated on {cluster.name}, {len(pipeline.stages)} stages of {width} rank{'s' * (width > 1)}, "
        f"{pipeline.trace.microbatches} microbatches"
    )
    firsts = _firsts(todo)
    made = []
    for stage, program in enumerate(pipeline.stages):
        own = range(firsts[stage], firsts[stage + 1])
        spans = tuple(_span(todo, times, number, own) for number in own)
        made.append(Timeline(program.trace, spans, seconds, f"stage {stage}", overheads[stage]))
    places = [(task.stage, number - firsts[task.stage]) for number, task in enumerate(todo)]
    across = {
        places[number]: places[at.cause]
        for number, at in enumerate(times)
        if at.cause is not None and todo[at.cause].stage != todo[number].stage
    }
    return PipelineTimeline(pipeline.trace, tuple(made), seconds, title, across, crossings(pipeline, cluster))


def _firsts(todo: Sequence[Task]) -> list[int]:
    """Number of the first task of each stage, and how many there are."""
    stages = [task.stage for task in todo]
    return [*(stages.index(stage) for stage in sorted(set(stages))), len(todo)]


def _span(todo: Sequence[Task], times: Sequence[Times], number: int, own: range) -> Span:
    """Of a task, in its stage's own numbers."""
    start, end, cause = times[number]
    task, own_cause = todo[number], cause - own.start if cause is not None and cause in own else None
    return Span(number - own.start, task.op, task.stream, start, end, own_cause)  # type: ignore[arg-type]


def crossings(pipeline: Pipeline, cluster: Cluster) -> tuple[Crossing, ...]:
    """What each stage's ranks send to those of each other one in a step."""
    found: dict[tuple[int, int], Crossing] = {}
    trace = pipeline.stages[0].trace
    for stage, program in enumerate(pipeline.stages):
        for op in program.ops:
            if isinstance(op, Send):
                assert trace.split is not None
                flow, target = trace.split.flows[op.flow], trace.split.ends(op.flow, op.back)[1]
                before = found.get((stage, target)) or Crossing(stage, target, link(trace, cluster, op.flow), 0, 0)
                nbytes = before.nbytes + (flow.grad_bytes if op.back else flow.nbytes)
                found[stage, target] = before._replace(messages=before.messages + 1, nbytes=nbytes)
    return tuple(found[ends] for ends in sorted(found))
