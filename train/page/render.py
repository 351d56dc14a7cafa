"""The pages: what the templates are given. jinja2 fills them in, and escapes what comes from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from train.config import flat
from train.page import facts, steps
from train.page.chart import Line, chart
from train.page.reading import Run
from train.page.ticks import number

CURVES = (("grad_norm", "gradient norm", True), ("lr", "learning rate", False), ("tokens_per_s", "tokens/s", True))
"""Key, title, whether it is noisy; of loss there is a chart of its own, with the held-out one."""


def single(run: Run, cluster: str | None) -> str:
    last = run.steps[-1]["step"] if run.steps else 1
    loss = [Line("loss", run.series("loss"), "a", True), Line("held-out", run.series("eval_loss"), "b")]
    charts = [chart("loss", loss, last)]
    charts += [chart(title, [Line(title, run.series(key), "a", noisy)], last) for key, title, noisy in CURVES]
    guess = steps.predicted(run, cluster)
    shown = None
    if run.timeline is not None:
        measured = run.timeline._replace(title=f"Step {run.recorded}, {run.timeline.title}")
        shown = steps.picture(measured) if guess is None else steps.picture(guess.timeline, measured)
    return _filled(
        "run.html",
        run=run,
        status=facts.status(run),
        tiles=facts.tiles(run),
        charts=charts,
        picture=shown,
        predicted=guess,
        representative=None if run.timeline is None else steps.representative(run),
        memory=steps.memory(run),
        settings=facts.settings(run),
        environment=facts.environment(run),
        happened=facts.happened(run),
        skipped=sum(bool(row.get("skipped")) for row in run.steps),
        program=None if run.program is None else steps.table(run),
    )


def compared(a: Run, b: Run) -> str:
    both = (a, b)
    last = max((run.steps[-1]["step"] if run.steps else 1) for run in both)
    names = _names(a, b)
    loss = [
        *(Line(name, run.series("loss"), kind, True) for run, name, kind in zip(both, names, "ab", strict=True)),
        *(
            Line(f"{name} held-out", run.series("eval_loss"), kind)
            for run, name, kind in zip(both, names, "cd", strict=True)
        ),
    ]
    charts = [chart("loss", loss, last)]
    for key, title, noisy in CURVES:
        lines = [Line(name, run.series(key), kind, noisy) for run, name, kind in zip(both, names, "ab", strict=True)]
        charts.append(chart(title, lines, last))
    picture = None
    if a.timeline is not None and b.timeline is not None:
        titled = [
            run.timeline._replace(title=f"{name}, step {run.recorded}")
            for run, name in zip(both, names, strict=True)
            if run.timeline
        ]
        picture = steps.picture(*titled)
    return _filled(
        "compare.html",
        runs=both,
        names=names,
        status=[facts.status(run) for run in both],
        numbers=_numbers(a, b),
        charts=charts,
        picture=picture,
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


def _numbers(a: Run, b: Run) -> list[tuple[str, str, str, str]]:
    """What, of each, and the second over the first."""
    typical = facts.typical
    pairs: list[tuple[str, float | None, float | None]] = [
        ("tokens/s, median", typical(a, "tokens_per_s"), typical(b, "tokens_per_s")),
        ("step, ms, median", typical(a, "step_ms"), typical(b, "step_ms")),
        ("loss, median of the last steps", facts.last_loss(a), facts.last_loss(b)),
        ("held-out loss, last", _last(a, "eval_loss"), _last(b, "eval_loss")),
        ("MFU, median", typical(a, "mfu"), typical(b, "mfu")),
        ("most memory, MiB", _most_memory(a), _most_memory(b)),
    ]
    rows = []
    for name, one, two in pairs:
        if one is None and two is None:
            continue
        ratio = f"{two / one:.3f}" if one and two is not None else ""
        rows.append((name, _number(one), _number(two), ratio))
    return rows


def _number(value: float | None) -> str:
    return "none" if value is None else number(value)


def _last(run: Run, key: str) -> float | None:
    points = run.series(key)
    return points[-1][1] if points else None


def _most_memory(run: Run) -> float | None:
    return max((nbytes / 2**20 for _, nbytes in run.series("mem_bytes")), default=None)


def _filled(template: str, **given: Any) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return made.get_template(template).render(**given) + "\n"
