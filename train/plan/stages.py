"""`python -m train.plan.stages`: what pipeline stages would buy, by simulation: a table in Markdown, row by row.

    without     the fastest of `search` without stages under the memory of the cluster's preset
    with        the fastest with stages, on the same ranks and the same sequences a step

It takes some minutes a row. `--row n` is one of them; `--picture file.png` draws the step of its faster one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import models
from models.parts.axes import NONE
from train.command_line import cli
from train.plan.step import PRECISIONS, trace_of
from yafsdp_fn.planner import CLUSTERS, Cluster, DoesNotFit, Found, search, simulate
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.schedules import Trace

A100 = CLUSTERS["a100-80g"]
H100 = CLUSTERS["h100-80g"]
SLOW = dataclasses.replace(A100, name="a100-80g, 100 Gbit/s a node", network_bandwidth=12e9)


class Row(NamedTuple):
    """A row of the table. sequences: of a step, one in each microbatch; stages: numbers of them to look at"""

    model: str
    ranks: int
    length: int
    sequences: int
    cluster: Cluster
    stages: tuple[int, ...] = (2, 4, 8, 16)

    def traced(self) -> Trace:
        """The step on as many ranks as have a sequence, if those are fewer."""
        world = min(self.ranks, self.sequences)
        microbatches = self.sequences // world
        rows = microbatches, self.length
        return trace_of(models.CONFIGS[self.model], rows, NONE, 1, axes(world), microbatches, PRECISIONS["bf16"])

    def found(self, stages: Sequence[int]) -> Found | str:
        """The result of `search`, or why there is none."""
        try:
            return search(self.traced(), self.cluster, stages=stages, ranks=self.ranks, runners_up=0)
        except DoesNotFit as error:
            return str(error).split(",")[0]
        except ValueError:
            return f"{self.sequences} sequences are too few for {self.ranks} GPUs"


ROWS = [
    *(Row("llama2-70b", 256, 4096, 256, cluster) for cluster in (A100, H100)),
    *(Row("llama2-70b", 256, 4096, 1024, cluster) for cluster in (A100, H100)),
    *(Row("llama3.1-405b", 16384, 4096, 16384, cluster, (2, 4, 8)) for cluster in (A100, H100)),
    *(Row("llama3.1-405b", 16384, 8192, 2048, cluster, (8, 16, 32)) for cluster in (A100, H100)),
    Row("llama2-70b", 256, 4096, 256, SLOW),
]


def cell(found: Found | str) -> str:
    """Seconds, memory and the schedule."""
    if isinstance(found, str):
        return f"{found} | |"
    best = found.best
    return f"{best.step_s:.2f} | {best.peak_bytes / 2**30:.1f} | `{best.point}`"


@dataclasses.dataclass(frozen=True)
class Options:
    row: int | None = None
    """One row alone, by its number from 0."""
    picture: Path | None = None
    """A file for a picture of its fastest step."""

    def __post_init__(self) -> None:
        if self.row is not None and not 0 <= self.row < len(ROWS):
            raise ValueError(f"--row {self.row}: expected 0 to {len(ROWS) - 1}")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rows that were asked for."""
    options = cli(Options, argv, prog="python -m train.plan.stages")
    for row in ROWS if options.row is None else [ROWS[options.row]]:
        both = [row.found((1,)), row.found(row.stages)]
        about = f"{row.model}, {row.ranks} x {row.cluster.name}, {row.sequences} x {row.length}"
        print(f"| {about} | {cell(both[0])} | {cell(both[1])} |", flush=True)
        if options.picture and (fits := [found for found in both if isinstance(found, Found)]):
            best = min(fits, key=lambda found: found.best.step_s)
            simulate(best.program, row.cluster, title=f"{about}: {best.best.point}").save(options.picture)


if __name__ == "__main__":
    main()
