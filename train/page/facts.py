"""Says in words and tables what a page tells about a run, the step that it recorded, and its memory by item."""

from __future__ import annotations

import base64
import statistics
from datetime import datetime
from typing import Any, NamedTuple

from markupsafe import Markup

import yafsdp_fn as ya
from train.config import ConfigError
from train.config_json import flat
from train.page.chart import number, size
from train.page.reading import Row, Run
from train.running.report import duration
from yafsdp_fn.planner.footprint import words
from yafsdp_fn.timeline import paint
from yafsdp_fn.timeline.spans import side_by_side
from yafsdp_fn.timeline.text import shown as seconds
from yafsdp_fn.util.words import counted

LAST = 20
"""Steps at the end of a run whose median is its last loss: that of one step says little."""
NOT_SETTINGS = ("name", "resume", "runs")


class Tile(NamedTuple):
    label: str
    value: str
    note: str = ""


def age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def status(run: Run) -> str:
    """Says in a sentence what became of the run, as far as its folder tells."""
    last = run.steps[-1]["step"] if run.steps else 0
    most = run.config.steps
    where = f"after step {last:,} of {most:,}"
    ends = [each for each in run.events if each["event"] in ("start", "end")]
    if not ends:
        return f"{where.capitalize()}; it has no events.jsonl, which would tell how it ended"
    if ends[-1]["event"] == "start":
        return f"{where.capitalize()}; no end was written: it goes on, or it was killed; last line {age(run.age)} ago"
    if ends[-1].get("error"):
        return f"Failed {where}: {ends[-1]['error']}"
    return f"Finished {where}" if last >= most else f"Stopped {where}; --name {run.name} --resume goes on"


def seconds_under_way(run: Run) -> float | None:
    """Seconds from each start to its end, added up; those without an end are not among them."""
    total = begun = 0.0
    for each in run.events:
        try:
            now = datetime.fromisoformat(each["time"]).timestamp()
        except ValueError:
            return None
        if each["event"] == "start":
            begun = now
        elif each["event"] == "end" and begun:
            total = total + now - begun
            begun = 0.0
    return total or None


def typical(run: Run, key: str) -> float | None:
    """The median over the steps that follow another one: the first of each start, which finds its program, is none."""
    firsts = {each.get("step", 0) + 1 for each in run.of("start")} | {1}
    values = [value for step, value in run.series(key) if step not in firsts]
    return statistics.median(values) if values else None


def nats(run: Run) -> str:
    return f"nats a {run.unit}"


def token(run: Run) -> str:
    """The run's notion of a token, in words."""
    if run.unit == "byte":
        return "a byte"
    known = run.start.get("tokenizer")
    return f"one of tokenizer {known}" if known else "one of a tokenizer that was not written down"


class Figures(NamedTuple):
    """A run in numbers; None what it has not written. loss: the median of the last; held: the last held-out one"""

    loss: float | None
    held: float | None
    speed: float | None
    step_ms: float | None
    mfu: float | None
    memory: float | None


def figures(run: Run) -> Figures:
    losses = [value for _, value in run.series("loss")[-LAST:]]
    held = [value for _, value in run.series("eval_loss")]
    return Figures(
        statistics.median(losses) if losses else None,
        held[-1] if held else None,
        typical(run, "tokens_per_s"),
        typical(run, "step_ms"),
        typical(run, "mfu"),
        max((nbytes for _, nbytes in run.series("mem_bytes")), default=None),
    )


def tiles(run: Run) -> list[Tile]:
    of = figures(run)
    held = run.series("eval_loss")
    last_step = run.steps[-1]["step"] if run.steps else 0
    found = [Tile("steps", f"{last_step:,}", f"of {run.config.steps:,}")]
    if of.loss is not None:
        last = f"median of the last {min(LAST, len(run.steps))} steps"
        found.append(Tile("loss", f"{of.loss:.4f}", f"{nats(run)}; {last}"))
    if of.held is not None:
        step, best = min(held, key=lambda point: point[1])
        least = "the lowest" if best == of.held else f"lowest {best:.4f} at step {step:,.0f}"
        found.append(Tile("held-out loss", f"{of.held:.4f}", f"{nats(run)}; step {held[-1][0]:,.0f}; {least}"))
    if of.speed is not None:
        found.append(Tile("tokens/s", f"{of.speed:,.0f}", f"median; a token is {token(run)}"))
    if of.step_ms is not None:
        found.append(Tile("step", f"{number(of.step_ms)} ms", "median"))
    if of.mfu is not None:
        found.append(Tile("MFU", f"{of.mfu:.1%}", "median; no causal half"))
    if of.memory is not None:
        what = "of tensors" if run.start.get("kind") == "cuda" else "of the process"
        found.append(Tile("most memory", size(of.memory), f"{what}, rank 0"))
    took = seconds_under_way(run)
    starts = len(run.of("start"))
    if took is not None:
        unended = starts - len(run.of("end"))
        note = f", {unended} without an end and not counted" * (unended > 0)
        found.append(Tile("time", duration(took), counted(starts, "start") + note))
    return found


def settings(run: Run) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """`(flag, value, default)` of what was changed, and `(flag, value)` of all the rest."""
    default = flat(type(run.config)())
    here = flat(run.config)
    names = [name for name in here if name not in NOT_SETTINGS]
    changed = [(name, shown(here[name]), shown(default[name])) for name in names if here[name] != default[name]]
    return changed, [(name, shown(here[name])) for name in names if here[name] == default[name]]


def shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"


def environment(run: Run) -> list[tuple[str, str]]:
    """Rows about the newest start."""
    start = run.start
    if not start:
        return []
    ranks = start.get("ranks")
    machines = start.get("machines")
    model = start.get("model") or flat(run.config).get("model", "")
    rows = {
        "model": f"{model}, {start.get('parameters', 0) / 1e6:.2f}M parameters",
        "ranks": f"{ranks} on {machines} machine{'s' * (machines != 1)}, threads of each: {start.get('threads')}",
        "device": start.get("device"),
        "tokens a step": f"{start.get('tokens', 0):,}",
        "a token": token(run),
        "text": start.get("text", "not written down"),
        "held out": start.get("heldout", "not written down"),
        "torch": f"{start.get('torch')}" + (f", CUDA {start['cuda']}" if start.get("cuda") else ""),
        "Python, system": f"{start.get('python')}, {start.get('system')}",
        "host": start.get("host"),
        "commit": start.get("commit") or "not known: outside of a repository",
        "command": start.get("command"),
    }
    return [(name, str(value)) for name, value in rows.items()]


def happened(run: Run) -> list[tuple[str, str]]:
    """`(time, what)`: starts, warnings, ends."""
    return [(each["time"].replace("T", " ")[:19], _words(each)) for each in run.events if each["event"] != "machine"]


def _words(event: Row) -> str:
    if event["event"] == "warning":
        return f"warning: {event.get('text', '')}"
    if event["event"] == "start":
        again = f", restart {event['attempt']}" if event.get("attempt") else ""
        return f"start, from step {event.get('step', 0):,}{again}"
    return f"{event['event']}, after step {event.get('step', 0):,}" + (
        f": {event['error']}" if event.get("error") else ""
    )


MANY = 500
"""Ops above which a picture is a bitmap: as vectors it would be megabytes."""
LINES = 400
"""Lines of a program's table that are shown."""


class Predicted(NamedTuple):
    """A prediction beside what was measured. on: whose figures; least: the bound, in words"""

    timeline: ya.timeline.Timeline
    on: str
    least: str
    rows: list[tuple[str, str, str, str]]
    """The rows: what, predicted, measured, error."""


def predicted(run: Run, cluster: str | None) -> Predicted | None:
    """The run's program simulated on `cluster`, else on the machine as the run has measured it; None without either."""
    where: Any = cluster or run.machine
    if run.timeline is None or run.program is None or where is None:
        return None
    try:
        plan = ya.planner.Plan.of(run.program, where)
    except ValueError as error:
        raise ConfigError(f"--cluster {cluster}: {error}" if cluster else f"{run.folder}: {error}") from None
    made = plan.timeline
    rows = side_by_side(made, run.timeline)
    table = []
    for name, one, two in rows:
        off = f"{one / two - 1:+.0%}" if two else ""
        table.append((name, seconds(one), seconds(two), off))
    on = f"the figures of {cluster}" if cluster else "figures that the run measured of its machine after its last step"
    return Predicted(made, on, plan.least.against(made.seconds), table)


def picture(*timelines: ya.timeline.Timeline) -> Markup:
    """The drawing, inside of the page."""
    many = sum(len(timeline.spans) for timeline in timelines) > MANY
    data = base64.b64encode(paint.picture(timelines, kind="png" if many else "svg")).decode()
    source = f"data:image/{'png' if many else 'svg+xml'};base64,{data}"
    return Markup('<div class="wide"><img class="picture" alt="timeline of a step" src="{}"></div>').format(source)


def representative(run: Run) -> str:
    """Compares the recorded step with the others."""
    assert run.timeline is not None
    text = f"Step {run.recorded:,}, the median of five recorded, took {seconds(run.timeline.seconds)} on rank 0"
    median = typical(run, "step_ms")
    if median is None:
        return text
    return f"{text}; the median of all steps, with all that is around them, is {number(median)} ms"


def memory(run: Run) -> tuple[list[tuple[str, str, float]], str] | None:
    """`(item, its size, part of the peak)` as predicted, and the op of the peak; None where costs are not known."""
    if run.program is None or not run.program.trace.precision:
        return None
    found = ya.planner.predict_memory(run.program, device=run.start.get("kind", "cpu"))
    peak = max(1, found.peak_bytes)
    items = {name: held for name, held in found.itemised().items() if held >= 2**10}
    rows = [(words(name), size(held), held / peak) for name, held in items.items()]
    return [*rows, ("peak", size(found.peak_bytes), 1.0)], f"op {found.op}: {found.at}"


def table(run: Run) -> str:
    """The program's, of which the middle is left out where it is long."""
    lines = str(run.program).splitlines()
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"... {len(lines) - LINES} more; print(step.program(state)) has them all"]
    return "\n".join(lines)
