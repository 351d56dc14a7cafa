"""A discrete-event simulation of a program on a cluster: every stream in order, every wait as the scoreboard has it.

An op begins when the op before it on its stream and all that it must wait for have ended. Between two events all
running phases progress at constant rates:

    compute           1, or 1 / (1 + contention) while another stream runs something
    node, network     1 / k while k streams use that link
    memory, host, latency   1

A program without updates is followed by the norm and one update of all units, as in a step.

Shared links and contention allow for anomalies: a faster part may begin something earlier that then slows the critical
path. For programs of the builders with gathers and reductions alone none has been seen; with all-reduces beside them,
or sums over several links, 12 in 80,000 random cases, of 1.4% at most.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from yafsdp_fn.planner.cluster import Cluster, Phase
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.costs import NO_COSTS, Foreign, groups, phases
from yafsdp_fn.schedules.ops import Backward, Forward, Op
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.scoreboard import Scoreboard
from yafsdp_fn.schedules.updating import after_program
from yafsdp_fn.timeline.spans import Span
from yafsdp_fn.timeline.timeline import Timeline

LINKS = ("node", "network")


class Task(NamedTuple):
    """An op as the simulation sees it. waits: numbers of earlier tasks; phases: what it does, one after the other."""

    op: Op | Foreign
    stream: str
    waits: tuple[int, ...]
    phases: tuple[Phase, ...]


def simulate(
    program: Program,
    cluster: str | Cluster,
    *,
    ranks: int | None = None,
    durations: Mapping[int, float] = {},
    title: str = "",
) -> Timeline:
    """The timeline of one step.

    ranks: that the same ops run on, each with the same batch, instead of the program's; its mesh must have one axis
    durations: op number -> seconds alone, measured, instead of what the cluster's figures say
    Raises ValueError for an unknown cluster, ranks that do not fill its nodes, a trace without costs, and an op that
    takes forever or less than nothing.
    """
    if not isinstance(program, Program):
        raise TypeError(f"simulate: expected a Program, got {type(program).__name__}: Program(trace, ops)")
    where = named(cluster)
    program = program if ranks is None else _on(program, ranks)
    world = program.trace.ranks * program.trace.replicas
    made = tasks(program, where, durations)
    return run(program, made, where, title or f"simulated on {where.name}, {world} rank{'s' * (world > 1)}")


def _on(program: Program, ranks: int) -> Program:
    if len(program.trace.mesh) > 1 or ranks < 1:
        raise ValueError(
            f"simulate(ranks={ranks}): the program's mesh is {program.trace.mesh}; expected one axis, and ranks >= 1. "
            "For another mesh build the schedule's program on trace.on(mesh)"
        )
    return program._replace(trace=program.trace.on(((program.trace.mesh[0][0], ranks),)))


def tasks(program: Program, cluster: Cluster, durations: Mapping[int, float] = {}) -> list[Task]:
    """The ops with their waits and costs."""
    trace = program.trace
    if not any(visit.cost.flops or visit.cost.attention_flops for visit in trace.visits) and not durations:
        raise ValueError(NO_COSTS)
    places = groups(trace, cluster)
    board: Scoreboard[int] = Scoreboard()
    kept = {(op.visit, op.microbatch) for op in program.ops if isinstance(op, Forward) and op.keep}
    out: list[Task] = []
    on_host: list[int] = []  # the last compute, where the host does it
    for number, op in enumerate(_whole(program)):
        waits = [*board.use(number, op.stream, *op.uses()), *on_host]
        recompute = False
        if isinstance(op, Backward) and (op.visit, op.microbatch) not in kept:
            visit = trace.visits[op.visit]
            recompute = bool(visit.trained) or any(value.grad_bytes for value in visit.cost.takes)
        if number in durations:
            cost: tuple[Phase, ...] = (Phase("compute" if op.stream == "compute" else "memory", durations[number]),)
        else:
            cost = phases(op, trace, cluster, places, recompute)
        if not all(0 <= phase.seconds < math.inf for phase in cost):
            what = f"op {number} ({type(op).__name__}) takes {sum(phase.seconds for phase in cost)} s"
            raise ValueError(f"{what}: expected a finite time of at least 0")
        if op.stream == "compute" and cluster.host_computes:
            on_host = [number]
        out.append(Task(op, op.stream, tuple(dict.fromkeys(waits)), cost))
    return out


def _whole(program: Program) -> list[Op | Foreign]:
    """The ops, with the norm and the update that follow a program without an update."""
    trained = program.trace.trained
    if program.trace.update_when == "never" or not trained or program.has_updates:
        return [*program.ops]
    return [*program.ops, *after_program(trained, program.trace.lent)]  # a step always reports the norm


class _Running:
    """What a stream is doing: the phases that are left of a task."""

    __slots__ = ("left", "phases", "task")

    def __init__(self, task: int, todo: tuple[Phase, ...]) -> None:
        self.task, self.phases, self.left = task, [*reversed(todo)], todo[0].seconds


def run(program: Program, todo: list[Task], cluster: Cluster, title: str) -> Timeline:
    """Runs the tasks; O(ops) events, of at most one running op per stream each."""
    queues: defaultdict[str, deque[int]] = defaultdict(deque)
    for number, task in enumerate(todo):
        queues[task.stream].append(number)
    starts, ends = [0.0] * len(todo), [math.nan] * len(todo)
    causes: list[int | None] = [None] * len(todo)
    before: dict[str, tuple[int, ...]] = dict.fromkeys(queues, ())  # the last that has begun on the stream
    running: dict[str, _Running] = {}
    now = 0.0
    while True:
        started = True
        while started:  # a task without phases ends at once, and may let others begin
            started = False
            for stream, queue in queues.items():
                if stream in running or not queue or any(math.isnan(ends[w]) for w in todo[queue[0]].waits):
                    continue
                number = queue.popleft()
                starts[number] = now
                # the last to end; the one before on the stream where several end together
                causes[number] = max((*before[stream], *todo[number].waits), key=ends.__getitem__, default=None)
                before[stream] = (number,)
                started = True
                if todo[number].phases:
                    running[stream] = _Running(number, todo[number].phases)
                else:
                    ends[number] = now
        if not running:
            break
        rates = _rates(running, cluster.contention)
        step = min(state.left / rates[stream] for stream, state in running.items())
        now += step
        for stream, state in list(running.items()):
            state.left -= step * rates[stream]
            if state.left <= 1e-12 * now:
                state.phases.pop()
                if state.phases:
                    state.left = state.phases[-1].seconds
                else:
                    ends[state.task] = now
                    del running[stream]
    assert not any(map(math.isnan, ends)), "waits point back in issue order, so that every op ends"
    spans = tuple(
        Span(number, task.op, task.stream, starts[number], ends[number], causes[number])  # type: ignore[arg-type]
        for number, task in enumerate(todo)
    )
    overhead = cluster.overhead(len(program.trace.units))
    return Timeline(program.trace, spans, now + overhead, title, overhead)


def _rates(running: dict[str, _Running], contention: float) -> dict[str, float]:
    resources = {stream: state.phases[-1].resource for stream, state in running.items()}
    users = Counter(resources.values())
    rates = {stream: 1.0 / users[used] if used in LINKS else 1.0 for stream, used in resources.items()}
    if "compute" in rates and len(rates) > 1:
        rates["compute"] /= 1.0 + contention
    return rates
