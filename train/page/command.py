"""`python -m train report RUN [RUN]`: reads folders, fills in a page's template, says where it is.

jinja2 escapes what comes from runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import tyro

import yafsdp_fn as ya
from train.command_line import cli
from train.config import ConfigError, require
from train.config_json import flat
from train.page import facts
from train.page.chart import Line, chart, number
from train.page.reading import Run, kinds, read
from train.running.elastic import CANNOT_WORK
from train.running.run import newest
from yafsdp_fn.planner.compare import in_one_unit
from yafsdp_fn.timeline.text import unit_of
from yafsdp_fn.util.disk import replace


@dataclass(frozen=True)
class Options:
    """Writes one self-contained HTML page about a run, or about two beside each other."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """One run's folder, or two. None given: the newest of runs/."""
    out: Path | None = None
    """The file to write. None given: report.html in the first folder, or report-A-B.html of two."""
    cluster: str | None = None
    """Predict the recorded step on this cluster (`plan --help` has the names). None given: on the figures that the run
    measured of its machine, where it was started with --calibrate."""


def main(argv: Sequence[str]) -> int:
    options = cli(Options, argv, prog="python -m train report")
    try:
        print(write(options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_WORK
    return 0


def write(options: Options) -> Path:
    """The page's path."""
    require(len(options.folders) <= 2, f"expected one folder or two, got {len(options.folders)}")
    folders = options.folders or (newest(Path("runs"), *kinds()),)
    runs = [read(folder) for folder in folders]
    name = "report.html" if len(runs) == 1 else f"report-{runs[0].name}-{runs[1].name}.html"
    path = options.out or folders[0] / name
    text = single(runs[0], options.cluster) if len(runs) == 1 else compared(runs[0], runs[1])
    require(len(runs) == 1 or options.cluster is None, "--cluster is for the page of one run")
    try:
        data = text.encode("utf-8", errors="replace")  # half of a surrogate pair is JSON, no text
        if options.out is None:
            replace(path, data)  # never through a link in somebody's folder
        else:
            path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; --out names another file") from None
    return path


CURVES = (("grad_norm", "gradient norm", True), ("lr", "learning rate", False), ("tokens_per_s", "tokens/s", True))
"""Key, title, whether it is noisy; of loss there is a chart of its own, with the held-out one."""


def single(run: Run, cluster: str | None) -> str:
    last = run.steps[-1]["step"] if run.steps else 1
    loss = [Line("loss", run.series("loss"), "a", True), Line("held-out", run.series("eval_loss"), "b")]
    charts = [chart(f"loss, {facts.nats(run)}", loss, last)]
    charts += [chart(title, [Line(title, run.series(key), "a", noisy)], last) for key, title, noisy in CURVES]
    guess = facts.predicted(run, cluster)
    shown = None
    if run.timeline is not None:
        measured = run.timeline._replace(title=f"Step {run.recorded}, {run.timeline.title}")
        shown = facts.picture(measured) if guess is None else facts.picture(guess.timeline, measured)
    return _filled(
        "run.html",
        run=run,
        status=facts.status(run),
        tiles=facts.tiles(run),
        charts=charts,
        picture=shown,
        predicted=guess,
        representative=None if run.timeline is None else facts.representative(run),
        memory=facts.memory(run),
        settings=facts.settings(run),
        environment=facts.environment(run),
        happened=facts.happened(run),
        skipped=sum(bool(row.get("skipped")) for row in run.steps),
        program=None if run.program is None else facts.table(run),
    )


def compared(a: Run, b: Run) -> str:
    both = (a, b)
    last = max((run.steps[-1]["step"] if run.steps else 1) for run in both)
    names = _names(a, b)
    drawn = list(zip(both, names, "ab", "cd", strict=True))
    apart = [drawn] if a.counts_as(b) else [[each] for each in drawn]  # other tokens, other axes
    charts = []
    for group in apart:
        loss = [Line(name, run.series("loss"), kind, True) for run, name, kind, _ in group]
        held = [Line(f"{name} held-out", run.series("eval_loss"), kind) for run, name, _, kind in group]
        charts.append(chart(f"loss, {facts.nats(group[0][0])}", [*loss, *held], last))
    for key, title, noisy in CURVES:
        for group in apart if key == "tokens_per_s" else [drawn]:
            lines = [Line(name, run.series(key), kind, noisy) for run, name, kind, _ in group]
            charts.append(chart(title, lines, last))
    picture = None
    if a.timeline is not None and b.timeline is not None:
        titled = [
            run.timeline._replace(title=f"{name}, step {run.recorded}")
            for run, name in zip(both, names, strict=True)
            if run.timeline
        ]
        picture = facts.picture(*titled)
    return _filled(
        "compare.html",
        runs=both,
        names=names,
        status=[facts.status(run) for run in both],
        numbers=_numbers(a, b),
        tokens=None if a.counts_as(b) else [facts.token(run) for run in both],
        charts=charts,
        picture=picture,
        steps=_steps(a, b, names),
        settings=_differences(*map(_settings, both)),
        environment=_differences(*(dict(facts.environment(run)) for run in both)),
    )


def _settings(run: Run) -> dict[str, str]:
    return {name: facts.shown(value) for name, value in flat(run.config).items() if name not in facts.NOT_SETTINGS}


def _differences(one: dict[str, str], two: dict[str, str]) -> list[tuple[str, str, str]]:
    """`(name, of the one, of the other)`; of different subcommands, a name may be there once."""
    pairs = ((name, one.get(name, "none"), two.get(name, "none")) for name in one | two)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _names(a: Run, b: Run) -> tuple[str, str]:
    """Told apart by their folders, where their names are the same."""
    return (a.name, b.name) if a.name != b.name else (str(a.folder), str(b.folder))


def _numbers(a: Run, b: Run) -> list[tuple[str, str, str, str, str]]:
    """The rows of a comparison: what, its unit, of each, and the second over the first. What is by the token, where
    tokens are not the same, has the unit of each beside its number, and no ratio."""
    alike, nats = a.counts_as(b), (facts.nats(a), facts.nats(b))
    loss = nats[:1] if alike else nats
    took, memory = ([facts.typical(run, "step_ms") for run in (a, b)], [_most_memory(run) for run in (a, b)])
    per_ms, time = unit_of(max((each for each in took if each), default=0.0) / 1000)
    nbytes, memory_unit = in_one_unit(max((each for each in memory if each), default=0.0))
    pairs: list[tuple[str, tuple[str, ...], float, list[float | None], bool]] = [
        ("speed, median", ("tokens/s",), 1.0, [facts.typical(run, "tokens_per_s") for run in (a, b)], alike),
        ("step, median", (time,), 1000 * per_ms, took, True),
        ("loss, median of the last steps", loss, 1.0, [facts.last_loss(run) for run in (a, b)], alike),
        ("held-out loss, last", loss, 1.0, [_last(run, "eval_loss") for run in (a, b)], alike),
        ("MFU, median", ("%",), 0.01, [facts.typical(run, "mfu") for run in (a, b)], True),
        ("most memory", (memory_unit,), nbytes, memory, True),
    ]
    rows = []
    for name, units, scale, (one, two), comparable in pairs:
        if one is None and two is None:
            continue
        ratio = f"{two / one:.3f}" if comparable and one and two is not None else ""
        own = [f" {unit}" for unit in units] if len(units) > 1 else ["", ""]
        first, second = (_number(value, scale, unit) for value, unit in zip((one, two), own, strict=True))
        rows.append((name, units[0] if len(units) == 1 else "", first, second, ratio))
    return rows


def _number(value: float | None, scale: float, unit: str) -> str:
    return "none" if value is None else number(value / scale) + unit


def _last(run: Run, key: str) -> float | None:
    points = run.series(key)
    return points[-1][1] if points else None


def _most_memory(run: Run) -> float | None:
    return max((nbytes for _, nbytes in run.series("mem_bytes")), default=None)


def _steps(a: Run, b: Run, names: tuple[str, str]) -> str | None:
    """The recorded steps beside each other in words; why they are not, where they are of two steps."""
    if a.timeline is None or b.timeline is None:
        return None
    one, two = names if names[0] != names[1] else ("first", "second")
    try:
        return str(ya.planner.compare({one: a.timeline, two: b.timeline}))
    except ValueError as error:
        return str(error)


def _filled(template: str, **given: Any) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return made.get_template(template).render(**given) + "\n"
