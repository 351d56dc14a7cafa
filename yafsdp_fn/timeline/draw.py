"""A picture of a timeline: streams as lanes, slots below them; two timelines one above the other on one time axis.

    lanes          gather, compute, reduce, replicate, offload, where used; a row per weight slot and gradient slot
    strips         above compute: which microbatch and which stack it is at, where there are several
    colour         the layer, from the first to the last; light: forward and weights, dark: backward and gradients
    hatched        a backward that recomputes its forward
    tinted         idle time of compute, by what it waited for
    outlined       the critical path

Lengths are inches until they are drawn. Needs matplotlib, which is imported when something is drawn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from yafsdp_fn.timeline import paint
from yafsdp_fn.timeline.geometry import Layout
from yafsdp_fn.timeline.paint import Painter
from yafsdp_fn.timeline.spans import Spans, of_one_stage

SUFFIXES = (".pdf", ".png", ".svg")
NARROW, WIDE = 9.0, 18.0  # of a figure
PER_SPAN = 0.085  # wanted width of an op of the fullest lane
MARGIN, LEFT, RIGHT = 0.12, 1.0, 0.15
HEADER, AXIS, BETWEEN = 0.42, 0.46, 0.18


def save(timeline: Spans, path: str | Path, beside: Spans | None = None) -> None:
    """Draws `timeline`, and `beside` below it, to a file. Raises ValueError for what has no ops, or another suffix."""
    path = Path(path)
    check_suffix(path)
    both = [timeline] if beside is None else [timeline, beside]
    of_one_stage("save(beside=)", *both)
    if empty := [each.title for each in both if not each.spans]:
        raise ValueError(f"the timeline {empty[0]!r} has no ops to draw")
    write(lambda: _figure(both), path)


def check_suffix(path: Path) -> None:
    """Raises ValueError for a file that is no picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path.name}: a picture is a file that ends in one of {', '.join(SUFFIXES)}")


def write(figure: Callable[[], Any], path: Path) -> None:
    """Writes what `figure` makes in the style of all pictures here."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to draw a timeline, pip install 'yafsdp_fn[plan]': it needs matplotlib") from error
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(style | {"hatch.linewidth": 0.5}):
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same bytes every time
        figure().savefig(path, dpi=120, metadata=dated.get(path.suffix.lower()))


def _figure(timelines: list[Spans]) -> Any:
    from matplotlib.figure import Figure

    fullest = max(len(each.on(stream)) for each in timelines for stream in each.streams)
    width = min(WIDE, max(NARROW, fullest * PER_SPAN + LEFT + RIGHT))
    across = width - LEFT - RIGHT
    layouts = [Layout(each, across, max(t.seconds for t in timelines)) for each in timelines]
    explained = paint.entries(layouts, width - 2 * MARGIN)
    below = AXIS + explained[-1].row * paint.ROW + 0.3
    height = sum(each.height + HEADER for each in layouts) + BETWEEN * (len(layouts) - 1) + below + MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height - MARGIN
    for each in layouts:
        top -= HEADER
        axes = figure.add_axes((LEFT / width, (top - each.height) / height, across / width, each.height / height))
        Painter(each, axes, LEFT - MARGIN).draw(last=each is layouts[-1])
        top -= each.height + BETWEEN
    floor = figure.add_axes((MARGIN / width, 0, 1 - 2 * MARGIN / width, (below - AXIS) / height))
    paint.draw(floor, explained, width - 2 * MARGIN, below - AXIS)
    return figure
