"""The step that a run recorded: its picture, beside the same step predicted, and its memory by item."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

import yafsdp_fn as ya
from train.config import ConfigError
from train.page.facts import typical
from train.page.reading import Run
from train.page.ticks import number, size
from yafsdp_fn.planner.footprint import words
from yafsdp_fn.timeline.text import shown

MANY = 500
"""Ops above which a picture is a bitmap: as vectors it would be megabytes."""
LINES = 400
"""Of a program's table."""


class Predicted(NamedTuple):
    """on: whose figures"""

    timeline: ya.Timeline
    on: str
    rows: list[tuple[str, str, str, str]]
    """What, predicted, measured, error."""


def predicted(run: Run, cluster: str | None) -> Predicted | None:
    """The run's program simulated on `cluster`, else on the machine as the run has measured it; None without either."""
    where: Any = cluster or run.machine
    if run.timeline is None or run.program is None or where is None:
        return None
    try:
        made = ya.simulate(run.program, where)
    except ValueError as error:
        raise ConfigError(f"--cluster {cluster}: {error}" if cluster else f"{run.folder}: {error}") from None
    found = ya.compare(made, run.timeline)
    rows = [("step", *found.step), *((name, *both) for name, both in found.busy.items())]
    table = [(name, shown(one), shown(two), f"{one / two - 1:+.0%}" if two else "") for name, one, two in rows]
    on = f"the figures of {cluster}" if cluster else "figures that the run measured of its machine after its last step"
    return Predicted(made, on, table)


def picture(upper: ya.Timeline, lower: ya.Timeline | None = None) -> Markup:
    """The drawing, inside of the page."""
    spans = len(upper.spans) + (0 if lower is None else len(lower.spans))
    kind = "svg" if spans <= MANY else "png"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"timeline.{kind}"
        upper.save(path, beside=lower)
        data = base64.b64encode(path.read_bytes()).decode()
    source = f"data:image/{'svg+xml' if kind == 'svg' else 'png'};base64,{data}"
    return Markup('<div class="wide"><img class="picture" alt="timeline of a step" src="{}"></div>').format(source)


def representative(run: Run) -> str:
    """How the recorded step compares with the others."""
    assert run.timeline is not None
    text = f"Step {run.recorded:,}, the median of five that were recorded, took {shown(run.timeline.seconds)} on rank 0"
    median = typical(run, "step_ms")
    return (
        text
        if median is None
        else f"{text}; the median of all steps, with all that is around them, is {number(median)} ms"
    )


def memory(run: Run) -> tuple[list[tuple[str, str, float]], str] | None:
    """`(item, its size, part of the peak)` as predicted, and the op of the peak; None where costs are not known."""
    if run.program is None or not run.program.trace.precision:
        return None
    found = ya.memory(run.program, device=run.start.get("kind", "cpu"))
    peak = max(1, found.peak_bytes)
    rows = [(words(name), size(held), held / peak) for name, held in found.itemised().items() if held >= 2**10]
    return [*rows, ("peak", size(found.peak_bytes), 1.0)], f"op {found.op}: {found.at}"


def table(run: Run) -> str:
    """The program's, of which the middle is left out where it is long."""
    lines = str(run.program).splitlines()
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"... {len(lines) - LINES} more; print(step.program(state)) has them all"]
    return "\n".join(lines)
