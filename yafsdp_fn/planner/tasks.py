"""The tasks of a program: each op with its waits, as the scoreboard has them, and its costs."""

import math
from collections.abc import Mapping

from yafsdp_fn.planner.cluster import Cluster, Phase
from yafsdp_fn.planner.costs import NO_COSTS, Foreign, groups, phases
from yafsdp_fn.planner.events import Task
from yafsdp_fn.schedules.ops import Backward, Forward, Op
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.scoreboard import Scoreboard
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.schedules.updating import after_program


def tasks(program: Program, cluster: Cluster, durations: Mapping[int, float] = {}) -> list[Task]:
    """The ops with their waits and costs."""
    trace = program.trace
    if trace.stage is None and not durations:
        check_costs(trace)
    places = groups(trace, cluster)
    board: Scoreboard[int] = Scoreboard()
    kept = {(op.visit, op.microbatch) for op in program.ops if isinstance(op, Forward) and op.keep}
    out: list[Task] = []
    on_host: list[int] = []  # the last compute, where the host does it
    for number, op in enumerate(_whole(program)):
        waits = [*board.use(number, op.stream, *op.uses()), *on_host]
        recompute = False
        if isinstance(op, Backward) and op.half != "weights" and (op.visit, op.microbatch) not in kept:
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


def overhead(program: Program, cluster: Cluster) -> float:
    """Seconds of a step that no op explains: by the units that a rank has a shard of."""
    return cluster.overhead(sum(program.trace.stage is None or unit.numel > 0 for unit in program.trace.units))


def check_costs(trace: Trace) -> None:
    """Raises ValueError where nothing has measured what visits cost."""
    if not any(visit.cost.flops or visit.cost.attention_flops for visit in trace.visits):
        raise ValueError(NO_COSTS)


def _whole(program: Program) -> list[Op | Foreign]:
    """The ops, with the norm and the update that follow a program without an update."""
    trained = program.trace.trained
    if program.trace.update_when == "never" or not trained or program.has_updates:
        return [*program.ops]
    return [*program.ops, *after_program(trained, program.trace.lent)]  # a step always reports the norm
