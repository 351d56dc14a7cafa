"""`python -m train report RUN [RUN]`: reads folders, fills in a page's template, says where it is.

jinja2 escapes what comes from runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jinja2
import tyro
from markupsafe import Markup

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
    if len(runs) == 1:
        name = "report.html"
        text = single(runs[0], options.cluster)
    else:
        name = f"report-{runs[0].name}-{runs[1].name}.html"
        text = compared(*runs)
        require(options.cluster is None, "--cluster is for the page of one run")
    path = options.out or folders[0] / name
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


class Drawn(NamedTuple):
    """A run in charts. name: "" of one alone; kind, held: the classes of the colours of its curves, and of held-out
    losses"""

    run: Run
    name: str
    kind: str
    held: str


def _charts(drawn: list[Drawn], alike: bool = True) -> list[Markup]:
    """The charts of some runs. alike: their tokens are the same; else what is by the token has axes of its own"""
    last = max(of.run.steps[-1]["step"] if of.run.steps else 1 for of in drawn)
    by_token = [drawn] if alike else [[of] for of in drawn]
    charts = []
    for group in by_token:
        lines = [Line(of.name or "loss", of.run.series("loss"), of.kind, True) for of in group]
        lines += [Line(f"{of.name} held-out".strip(), of.run.series("eval_loss"), of.held) for of in group]
        charts.append(chart(f"loss, {facts.nats(group[0].run)}", lines, last))
    for key, title, noisy in CURVES:
        for group in by_token if key == "tokens_per_s" else [drawn]:
            lines = [Line(of.name or title, of.run.series(key), of.kind, noisy) for of in group]
            charts.append(chart(title, lines, last))
    return charts


def single(run: Run, cluster: str | None) -> str:
    recorded = cluster is None or run.timeline is not None
    require(recorded, f"--cluster {cluster}: {run.folder} has recorded no step to predict (--timeline-every)")
    guess = facts.predicted(run, cluster)
    steps = []
    if run.timeline is not None:
        measured = run.timeline._replace(title=f"Step {run.recorded}, {run.timeline.title}")
        steps = [measured] if guess is None else [guess.timeline, measured]
    return _filled(
        "run.html",
        run=run,
        status=facts.status(run),
        tiles=facts.tiles(run),
        charts=_charts([Drawn(run, "", "a", "b")]),
        picture=facts.picture(*steps) if steps else None,
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
    names = a.name, b.name
    if a.name == b.name:
        names = str(a.folder), str(b.folder)
    alike = a.counts_as(b)
    drawn = [Drawn(*each) for each in zip(both, names, "ab", "cd", strict=True)]
    steps = [
        run.timeline._replace(title=f"{name}, step {run.recorded}")
        for run, name in zip(both, names, strict=True)
        if run.timeline is not None
    ]
    return _filled(
        "compare.html",
        runs=both,
        names=names,
        status=[facts.status(run) for run in both],
        numbers=_numbers(a, b, alike),
        tokens=None if alike else [facts.token(run) for run in both],
        charts=_charts(drawn, alike),
        picture=facts.picture(*steps) if len(steps) == 2 else None,
        steps=_steps(a, b, names),
        settings=_differences(*map(_settings, both)),
        environment=_differences(*(dict(facts.environment(run)) for run in both)),
    )


def _settings(run: Run) -> dict[str, str]:
    every = flat(run.config)
    return {name: facts.shown(value) for name, value in every.items() if name not in facts.NOT_SETTINGS}


def _differences(one: dict[str, str], two: dict[str, str]) -> list[tuple[str, str, str]]:
    """`(name, of the one, of the other)`; of different subcommands, a name may be there once."""
    pairs = ((name, one.get(name, "none"), two.get(name, "none")) for name in one | two)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _numbers(a: Run, b: Run, alike: bool) -> list[tuple[str, str, str, str, str]]:
    """The rows of a comparison: what, its unit, of each, and the second over the first. What is by the token, where
    tokens are not the same, has the unit of each beside its number, and no ratio."""
    one = facts.figures(a)
    two = facts.figures(b)
    per_ms, time = unit_of(max(one.step_ms or 0.0, two.step_ms or 0.0) / 1000)
    nbytes, memory = in_one_unit(max(one.memory or 0.0, two.memory or 0.0))
    by_token = ("speed", "loss", "held")
    loss = facts.nats(a) if alike else ""
    own = (f" {facts.nats(a)}", f" {facts.nats(b)}")
    kinds = (
        ("speed", "speed, median", "tokens/s", 1.0),
        ("step_ms", "step, median", time, 1000 * per_ms),
        ("loss", "loss, median of the last steps", loss, 1.0),
        ("held", "held-out loss, last", loss, 1.0),
        ("mfu", "MFU, median", "%", 0.01),
        ("memory", "most memory", memory, nbytes),
    )
    rows = []
    for field, name, unit, scale in kinds:
        first = getattr(one, field)
        second = getattr(two, field)
        comparable = alike or field not in by_token
        shown, other = (
            "none" if value is None else number(value / scale) + beside
            for value, beside in zip((first, second), ("", "") if unit else own, strict=True)
        )
        ratio = f"{second / first:.3f}" if comparable and first and second is not None else ""
        if first is not None or second is not None:
            rows.append((name, unit, shown, other, ratio))
    return rows


def _steps(a: Run, b: Run, names: tuple[str, str]) -> str | None:
    """The recorded steps beside each other in words; why they are not, where they are of two steps."""
    if a.timeline is None or b.timeline is None:
        return None
    one, two = names if names[0] != names[1] else ("first", "second")  # of one folder
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
