"""`python -m train published --rows FILE.csv` and `--fit`: runs of LLM Foundry predicted, and the fit that does it.

    --rows     each row of the file with the committed figures; errors where it says what was measured; and which rows
               are of what is not modelled
    --fit      the figures again, from the committed rows; errors seen, with a row left out, with a model left out

Errors are predicted over measured tokens/s, less one, in percent; medians and 90th percentiles are of absolute errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.config.error import ConfigError
from train.published.foundry import KINDS, Row, lines_of, peak, row, rows, tokens_per_s
from train.published.foundry_fit import Fit, Vector, fit_all, fitted


class Predicted(NamedTuple):
    """tokens_per_s: of a GPU; peak_bytes: of one, as the planner counts them"""

    row: Row
    tokens_per_s: float
    peak_bytes: int

    @property
    def error(self) -> float | None:
        return None if self.row.measured is None else 100 * (self.tokens_per_s / self.row.measured - 1)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= KINDS[self.row.gpu].memory_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            **self.row._asdict(),
            "predicted_tokens_per_s_per_gpu": round(self.tokens_per_s, 1),
            "error": None if self.error is None else round(self.error, 2),
            "predicted_peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def predict(run: Row) -> Predicted:
    """With the committed figures."""
    return Predicted(run, tokens_per_s(run, fitted()[run.gpu]), peak(run).peak_bytes)


def spread(errors: Iterable[float]) -> dict[str, float]:
    """Number, median, 90th percentile and largest of absolute errors."""
    sizes = np.abs(list(errors))
    found = {"median": np.median(sizes), "p90": np.percentile(sizes, 90), "largest": sizes.max()}
    return {"rows": len(sizes), **{name: round(float(value), 2) for name, value in found.items()}}


def summary(predictions: list[Predicted]) -> dict[str, Any]:
    """The spread of all rows that were measured, by kind of GPU, and by number of GPUs."""

    def by(key: Callable[[Row], object]) -> dict[str, Any]:
        keys = sorted({key(one.row) for one in measured}, key=lambda each: (isinstance(each, str), each))
        return {str(each): spread(one.error or 0.0 for one in measured if key(one.row) == each) for each in keys}

    measured = [one for one in predictions if one.error is not None]
    whole = {"all": spread(one.error or 0.0 for one in measured)} if measured else {}
    return {**whole, "by_gpu": by(lambda row: row.gpu), "by_number_of_gpus": by(lambda row: row.gpus)}


def show_rows(file: Path, as_json: bool) -> None:
    """Predicts the rows of a file, and names those that cannot be. Raises ConfigError where none can."""
    table, refused = list[Row](), list[str]()
    try:
        for at, line in lines_of(file):
            try:
                table.append(row(line, at))
            except ValueError as error:
                refused.append(str(error))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rows: {error}") from None
    if not table:
        raise ConfigError(f"--rows: {refused[0] if refused else f'{file} has no rows'}")
    predictions = [predict(one) for one in table]
    found = summary(predictions)
    if as_json:
        figures = {kind: fitted()[kind] for kind in sorted({one.gpu for one in table})}
        listed = [one.as_json() for one in predictions]
        print(json.dumps({"figures": figures, "rows": listed, "not predicted": refused, **found}, indent=1))
        return
    print(f"{'':<58} {'tokens/s/GPU':>12} {'measured':>9} {'error, %':>8} {'peak, GiB':>9}")
    for one in predictions:
        seen = "" if one.error is None else f"{one.row.measured:9.0f} {one.error:8.1f}"
        over = "" if one.fits else "  does not fit"
        print(f"{one.row!s:<58} {one.tokens_per_s:12.0f} {seen:>18} {one.peak_bytes / 2**30:9.1f}{over}")
    _print_spreads({"all": found["all"]} if "all" in found else {})
    for of in ("by_gpu", "by_number_of_gpus"):
        _print_spreads(found[of])
    for why in refused:
        print(f"not predicted: {why}")


def show_fit(as_json: bool) -> None:
    """Fits the figures to the committed rows."""
    fits = fit_all(rows())
    seen = {"seen": "errors", "row left out": "row_out", "model left out": "model_out"}
    found = {
        "figures": {
            kind: {name: float(f"{value:.4g}") for name, value in of.figures.items()} for kind, of in fits.items()
        },
        **{words: _of_kinds(fits, lambda of, name=name: getattr(of, name)) for words, name in seen.items()},  # type: ignore[misc]
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for kind, of in fits.items():
        print(f"{kind:<12}", ", ".join(f"{name} {value:.4g}" for name, value in of.figures.items()))
    for words in seen:
        print(f"\n{words}")
        _print_spreads(found[words])


def _of_kinds(fits: dict[str, Fit], errors: Callable[[Fit], Vector]) -> dict[str, Any]:
    whole = np.concatenate([errors(of) for of in fits.values()])
    return {kind: spread(errors(of)) for kind, of in fits.items()} | {"all": spread(whole)}


def _print_spreads(found: dict[str, Any]) -> None:
    for name, of in found.items():
        words = f"median {of['median']:5.2f}%   p90 {of['p90']:5.2f}%   largest {of['largest']:5.2f}%"
        print(f"{name:<12} {of['rows']:>4} rows   {words}")
