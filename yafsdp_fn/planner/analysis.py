"""What bounds a simulated step: its work without any waiting, and how it answers to each figure of the hardware."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from yafsdp_fn.planner.cluster import COSTS, Cluster
from yafsdp_fn.planner.events import LINKS, Task
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.tasks import overhead
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.stages.pipeline import Pipeline


class Work(NamedTuple):
    """Seconds of a step if nothing ever waited or was slowed.

    compute_s: of the compute stream; comm_s: of what communication needs most, a link or one of its streams;
    overhead_s: that the cluster adds to any schedule. Of a pipeline, of the stage that has most of it
    """

    compute_s: float
    comm_s: float
    overhead_s: float

    @property
    def bound(self) -> str:
        """Which of them a perfect schedule would still take."""
        return "compute" if self.compute_s >= self.comm_s else "communication"

    @property
    def seconds(self) -> float:
        """The larger, and the overhead: no order of the same ops is faster."""
        return max(self.compute_s, self.comm_s) + self.overhead_s


def work(program: Program | Pipeline, todo: Iterable[Task], cluster: Cluster) -> Work:
    """The work in `todo`, the tasks of `program`, each alone."""
    streams: defaultdict[tuple[int, str], float] = defaultdict(float)
    links: defaultdict[tuple[int, str], float] = defaultdict(float)
    for task in todo:
        for phase in task.phases:
            streams[task.stage, task.stream] += phase.seconds
            if phase.resource in LINKS:
                links[task.stage, phase.resource] += phase.seconds
    compute = max((seconds for (_, stream), seconds in streams.items() if stream == "compute"), default=0.0)
    others = [seconds for (_, stream), seconds in streams.items() if stream != "compute"]
    programs = program.stages if isinstance(program, Pipeline) else (program,)
    return Work(
        compute, max([*others, *links.values()], default=0.0), max(overhead(each, cluster) for each in programs)
    )


def sensitivity(program: Program | Pipeline, cluster: Cluster) -> dict[str, float]:
    """Figure of the cluster -> percent by which the step shortens when that figure gets one percent better."""
    base = simulate(program, cluster).seconds
    found = {}
    for figure, value in vars(cluster).items():
        if figure in ("name", "gpus_per_node", "memory_bytes", "host_computes") or value in (0.0, math.inf):
            continue
        better = cluster.replace(**{figure: value * (0.99 if figure in COSTS else 1.01)})
        found[figure] = 100 * (1 - simulate(program, better).seconds / base)
    return found
