"""Simulates a program on a cluster: its tasks, the rates of those that share links, and what bounds the step."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.planner.cluster import Cluster, Phases
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.costs import NO_COSTS, Costs, Foreign, link, seconds_of
from yafsdp_fn.program.events import EventTime, Rate, StageEvent, play
from yafsdp_fn.program.ops import (
    OPS,
    AllReduce,
    Backward,
    ComputeOp,
    Forward,
    MessageOp,
    Norm,
    Op,
    Receive,
    Send,
    Update,
)
from yafsdp_fn.program.program import Program, after_program, must_be_program
from yafsdp_fn.program.split import Message
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.timeline.spans import Inside, Span, StageTraffic
from yafsdp_fn.timeline.timeline import Timeline
from yafsdp_fn.util.words import counted

# ---- Simulates tasks: the rates of phases that share links or the device, on the loop of program/events.py.

LINKS = ("node", "network")
Calls = tuple[tuple[str, float], ...]


class OpTask(NamedTuple):
    """An op with its waits and costs.

    waits: numbers of other tasks; phases: what it does, one after the other
    stage: that does it; partner: number of the task that is the other end of its transfer, which has the same phases
    calls: of a compute, the collectives of its block, which are among the phases: names, and seconds alone
    """

    op: Op | Foreign
    stream: str
    waits: tuple[int, ...]
    phases: Phases
    stage: int = 0
    partner: int | None = None
    calls: Calls = ()


def rates_on(cluster: Cluster) -> Rate:
    """Returns the rate of a phase beside those that its stage runs: links are shared, and slow down beside computes, as
    these do beside anything else."""

    def rate(resource: str, computes: bool, beside: Sequence[str]) -> float:
        if resource in LINKS:
            return 1.0 / beside.count(resource) / (1.0 + cluster.link_contention * ("compute" in beside))
        if computes and len(beside) > 1:  # copies of that stream, too
            return 1.0 / (1.0 + cluster.contention)
        return 1.0

    return rate


# ---- The tasks of a program: each op with its waits, as the scoreboard has them, and its costs.
#
#     stage 0    F0 F1 F2 F3          B0    B1    B2    B3        compute
#                  \                 /
#     stage 1        F0          B0                               a send and its receive are one transfer
#
# The tasks of all stages are one list. What ties stages together: transfers, which begin when both ends have come to
# them and are over at both together; the gradients of units that stages share, which all of them sum up; and the norm
# of the whole gradient, which the updates of every stage wait for.


def tasks(program: Program, cluster: Cluster) -> list[OpTask]:
    """Returns the ops with their waits and costs, one stage after the other.

    Raises ValueError for a step without costs, stages that do not lie evenly on nodes, a message without its other end.
    """
    if program.trace.stage is None:
        check_costs(program.trace)
    if len(program.stages) == 1:
        return _of_stage(program, 0, 0, cluster)
    _check_places(program, cluster)
    out: list[OpTask] = []
    for stage, part in enumerate(program.by_stage):
        out += _of_stage(part, stage, len(out), cluster)
    return _tied(out)


def _of_stage(program: Program, stage: int, first: int, cluster: Cluster) -> list[OpTask]:
    """Returns the tasks of one stage, which are numbered from `first` on."""
    trace = program.trace
    costs = Costs(trace, cluster)
    board: Scoreboard[int] = Scoreboard()
    kept = {(op.visit, op.microbatch) for op in program.ops if isinstance(op, Forward) and op.keep}
    out: list[OpTask] = []
    on_host: list[int] = []  # the last compute, where the host does it

    @functools.cache
    def of_compute(op: ComputeOp, recompute: bool) -> tuple[Phases, Calls]:
        each = costs.collectives(op, recompute)
        return costs.phases(op, recompute), tuple((name, seconds_of(of_one)) for name, of_one in each)

    for number, op in enumerate(_whole(program)):
        waits = [*board.use(first + number, op.stream, *op.uses()), *on_host]
        recompute = False
        if isinstance(op, Backward) and op.half != "weights" and (op.visit, op.microbatch) not in kept:
            visit = trace.visits[op.visit]
            recompute = bool(visit.trained) or any(value.grad_bytes for value in visit.cost.takes)
        if isinstance(op, ComputeOp):  # alike in every microbatch
            cost, calls = of_compute(op._replace(microbatch=0), recompute)
        else:
            cost = costs.phases(op)
            calls = Calls()
        if not all(0 <= phase.seconds < math.inf for phase in cost):
            what = f"op {number} ({type(op).__name__}) takes {seconds_of(cost)} s"
            raise ValueError(f"{what}: expected a finite time of at least 0")
        if op.stream == "compute" and cluster.host_computes:
            on_host = [first + number]
        out.append(OpTask(op, op.stream, tuple(dict.fromkeys(waits)), cost, stage, calls=calls))
    return out


def _tied(todo: Sequence[OpTask]) -> list[OpTask]:
    """Ties stages together: a send and its receive are partners; updates wait for the norms of all stages; and what
    waits for the sum of a unit's gradient on one stage waits for it on all stages that share the unit."""
    ends: dict[tuple[type, Message], int] = {}
    norms: dict[int, int] = {}
    sums: dict[tuple[int, ...], list[int]] = {}
    for number, task in enumerate(todo):
        match task.op:
            case Send() | Receive() as op:
                ends[type(op), op.message] = number
            case Norm():
                norms[task.stage] = number
            case AllReduce(over="stages") as op:
                sums.setdefault(op.units, []).append(number)
    together = {number: numbers for numbers in sums.values() for number in numbers}
    out = []
    for number, task in enumerate(todo):
        waits = [other for wait in task.waits for other in together.get(wait, [wait])]
        if isinstance(task.op, Update) and number > norms.get(task.stage, number):
            waits += norms.values()
        partner = None
        if isinstance(task.op, MessageOp):
            other_end = Receive if isinstance(task.op, Send) else Send
            partner = ends[other_end, task.op.message]
        out.append(task._replace(waits=tuple(dict.fromkeys(waits)), partner=partner))
    return out


def overhead(trace: Trace, cluster: Cluster) -> float:
    """Returns the seconds of a step that no op explains: by the units that a rank has a shard of."""
    held = [unit for unit in trace.units if trace.stage is None or unit.numel > 0]
    return cluster.overhead(len(held))


def check_costs(trace: Trace) -> None:
    """Raises ValueError where nothing has measured what visits cost, and where the order is of other microbatches than
    the trace says: a bound of the one would be above a step of the other."""
    if not any(visit.cost.flops or visit.cost.attention_flops for visit in trace.visits):
        raise ValueError(NO_COSTS)
    in_order = len({compute.microbatch for compute in trace.order})
    if in_order != trace.microbatches:
        raise ValueError(
            f"the trace says {trace.microbatches} microbatches, its order has computes of {in_order}: "
            "trace._replace(microbatches=n, order=ya.schedules.chained_order(trace.visits, n))"
        )


def _whole(program: Program) -> list[Op | Foreign]:
    """Returns the ops, with the norm and the update that follow a program without an update."""
    trained = program.trace.trained
    if program.trace.update_when == "never" or not trained or program.has_updates:
        return [*program.ops]
    return [*program.ops, *after_program(trained, program.trace.lent)]  # a step always reports the norm


def _check_places(program: Program, cluster: Cluster) -> None:
    trace = program.by_stage[0].trace
    node = cluster.gpus_per_node
    width = trace.stage_ranks
    world = width * len(program.stages)
    if (width % node and node % width) or (world > node and world % node):
        raise ValueError(
            f"{len(program.stages)} stages of {width} ranks do not lie evenly on nodes of {node} GPUs "
            f"({cluster.name}): a stage takes whole nodes, or a node whole stages"
        )


# ---- A discrete-event simulation of a program on a cluster: every stream in order, every wait as the scoreboard has
# it.
#
# An op begins when the op before it on its stream and all that it must wait for have ended. Between two events all
# running phases progress at constant rates:
#
#     compute           1, or 1 / (1 + contention) while another stream runs something
#     node, network     1 / k while k streams use that link, over 1 + link_contention beside compute
#     memory, host, latency   1
#
# A program without updates is followed by the norm and one update of all units, as in a step. All stages are
# simulated together.
#
# Shared links and contention allow for anomalies: a faster part may begin something earlier that then slows the
# critical path. For programs of the builders with gathers and reductions alone none has been seen; with all-reduces
# beside them, or sums over several links, 12 in 80,000 random cases, of 1.4% at most.


def simulate(program: Program, cluster: str | Cluster, *, title: str = "") -> Timeline:
    """Returns the timeline of one step, of all stages on one time axis.

    Raises Refused for a program that `ya.verify` refuses, ValueError for an unknown cluster, ranks that do not fill its
    nodes, a trace without costs, and an op that takes forever or less than nothing.

    >>> timeline = ya.planner.simulate(program, "a100-80g")
    >>> len(timeline.spans) == len(program.ops), timeline.seconds > timeline.compute_s
    (True, True)
    """
    where = named(cluster)
    program = proved(program, "simulate")
    return run(program, tasks(program, where), where, title)


def proved(program: Program, call: str) -> Program:
    """Returns `program`, verified: figures of a wrong one would look like any others. Rules do not know another
    library's copies: with some among the ops it is taken as it is. call: the user's, for errors"""
    must_be_program(program, call)
    ours = all(isinstance(op, OPS) for ops in program.stages for op in ops)
    return verify(program) if ours else program


def run(program: Program, todo: Sequence[OpTask], cluster: Cluster, title: str = "") -> Timeline:
    """Runs the tasks; O(ops) events, of at most one running op per stream each. Raises ValueError where stages wait for
    each other for ever."""
    events = [StageEvent(task.stage, task.stream, task.waits, task.phases, task.partner) for task in todo]
    times = play(events, rates_on(cluster))
    slower = 1 + cluster.straggling(program.trace.world)
    spans = []
    for number, (task, at) in enumerate(zip(todo, times, strict=True)):
        if at is None:
            raise ValueError("the stages wait for each other for ever: ya.verify says where")
        at = EventTime(at.start * slower, at.end * slower, at.cause)
        spans.append(Span(number, task.op, task.stream, *at, task.stage, _inside(task, at)))  # type: ignore[arg-type]
    end = max((span.end for span in spans), default=0.0)
    after = max(overhead(part.trace, cluster) for part in program.by_stage)
    shown = title or f"simulated on {cluster.name}, {_in_words(program)}"
    return Timeline(program.trace, tuple(spans), end + after, shown, after, crossings(program, cluster))


def _inside(task: OpTask, at: EventTime) -> tuple[Inside, ...]:
    """Returns the collectives of a compute, with equal parts of what it computes around them."""
    if not task.calls:
        return ()
    alone = sum(phase.seconds for phase in task.phases)
    scale = (at.end - at.start) / alone
    called = sum(seconds for _, seconds in task.calls)
    gap = (alone - called) / (len(task.calls) + 1)
    now = at.start
    found = list[Inside]()
    for name, seconds in task.calls:
        begin = now + gap * scale
        now = min(begin + seconds * scale, at.end)
        found.append(Inside(begin, now, name))
    return tuple(found)


def _in_words(program: Program) -> str:
    """Stages, ranks and microbatches, as a title has them."""
    stages = len(program.stages)
    trace = program.trace
    ranks = counted(trace.stage_ranks, "rank")
    return ranks if stages == 1 else f"{stages} stages of {ranks}, {counted(trace.microbatches, 'microbatch')}"


def crossings(program: Program, cluster: Cluster) -> tuple[StageTraffic, ...]:
    """Returns the messages that each stage's ranks send to those of each other one in a step."""
    trace = program.trace
    found: dict[tuple[int, int], StageTraffic] = {}
    for op in itertools.chain.from_iterable(program.stages):
        if not isinstance(op, Send):
            continue
        ends = trace.cut.ends(op.flow, op.back)
        before = found.get(ends, StageTraffic(*ends, link(trace, cluster, op.flow), 0, 0))
        nbytes = before.nbytes + trace.cut.bytes_of(op.message)
        found[ends] = before._replace(messages=before.messages + 1, nbytes=nbytes)
    return tuple(found[ends] for ends in sorted(found))


# ---- What bounds a simulated step: its work without any waiting.


class Work(NamedTuple):
    """Seconds of a step if nothing ever waited or was slowed.

    compute_s: of the compute stream; comm_s: of what communication needs most, a link or one of its streams;
    overhead_s: that the cluster adds to any schedule. Across stages each figure is that of the stage with most of it
    """

    compute_s: float
    comm_s: float
    overhead_s: float

    @property
    def bound(self) -> str:
        """The work that a perfect schedule would still take: compute or communication."""
        return "compute" if self.compute_s >= self.comm_s else "communication"

    @property
    def seconds(self) -> float:
        """The larger, and the overhead: no order of the same ops is faster."""
        return max(self.compute_s, self.comm_s) + self.overhead_s


def work(program: Program, todo: Iterable[OpTask], cluster: Cluster) -> Work:
    """Returns the work in `todo`, the tasks of `program`, each alone."""
    computes: defaultdict[int, float] = defaultdict(float)
    others: defaultdict[tuple[int, str], float] = defaultdict(float)  # of streams and of links
    for task in todo:
        for phase in task.phases:
            if task.stream == "compute":
                computes[task.stage] += phase.seconds
            else:
                others[task.stage, task.stream] += phase.seconds
            if phase.resource in LINKS:
                others[task.stage, phase.resource] += phase.seconds
    return Work(
        compute_s=max(computes.values(), default=0.0),
        comm_s=max(others.values(), default=0.0),
        overhead_s=max(overhead(each.trace, cluster) for each in program.by_stage),
    )
