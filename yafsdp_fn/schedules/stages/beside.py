"""Two stages' lists side by side, as refusals draw them.

stage 0                                          stage 1
op 4   send segment 0 -> 1 <- carry slot 0       op 0   receive segment 0 -> 1 -> carry slot 1
op 9   send gradient ...                    <--> op 7   receive ...
"""

from collections.abc import Sequence

from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.text import describe

AROUND = 3
"""Lines before and after the two that do not fit."""

Side = tuple[int, Sequence[int], int]
"""Stage, the ops to show, and which of them does not fit."""


def beside(pipeline: Pipeline, left: Side, right: Side) -> str:
    columns = [_column(pipeline, side) for side in (left, right)]
    width = max(map(len, columns[0]))
    middle = ["    "] * (AROUND + 1) + ["<-->"] + ["    "] * AROUND
    rows = [
        f"    {a.ljust(width)} {mark} {b}".rstrip() for a, mark, b in zip(columns[0], middle, columns[1], strict=True)
    ]
    return "\n".join(row for row in rows if row)


def _column(pipeline: Pipeline, side: Side) -> list[str]:
    stage, ops, mark = side
    lines = [f"stage {stage}"]
    for place in range(mark - AROUND, mark + AROUND + 1):
        at = ops[place] if 0 <= place < len(ops) else None
        words = "" if at is None else f"op {at:<3}  {describe(pipeline.stages[stage].ops[at], pipeline.trace)}"
        lines.append(words or ("nothing" if place == mark else ""))
    return lines
