"""The fit of three figures to the published rows of a kind of GPU, and what it says of rows that it has not seen.

seconds(row, x)   close to a straight line in x, the reciprocals of the rates: simulated once, and once per figure
fit               least absolute relative errors on these lines, which no row that went wrong can bend
left out          fitted without a row, or without all rows of a model; predicted by the row's own line
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.published.foundry import KINDS, TABLE, Figures, Row, seconds

FITTED = TABLE.with_name("llm_foundry_fit.json")
NAMES = ("matmul_flops", "attention_flops", "memory_bandwidth")
START = {
    "a100_40gb": (2.69e14, 0.970e14, 0.790e12),
    "a100_80gb": (3.13e14, 0.981e14, 0.734e12),
    "h100_80gb": (8.68e14, 1.77e14, 1.22e12),
}
"""Where the lines are taken: near the fit, so that they are its own."""
Vector = NDArray[np.float64]


@functools.cache
def fitted() -> dict[str, Figures]:
    """The figures that are committed, by kind of GPU: `python -m train published --fit --json` has made them."""
    found: dict[str, Figures] = json.loads(FITTED.read_text())["figures"]
    return found


class Lines(NamedTuple):
    """Seconds over those measured, of each row, as `base + slopes @ x`. base: [rows]; slopes: [rows, figures]"""

    base: Vector
    slopes: Vector

    def at(self, x: Vector) -> Vector:
        return self.base + self.slopes @ x

    def without(self, left: NDArray[np.bool_]) -> Lines:
        return Lines(self.base[~left], self.slopes[~left])


def _figures(x: Vector) -> Figures:
    return dict(zip(NAMES, (1 / x).tolist(), strict=True))


def lines(table: list[Row], x: Vector) -> Lines:
    """Of rows that were measured, around `x`."""
    measured = np.array([row.tokens / (row.measured or np.nan) for row in table])
    now = np.array([seconds(row, _figures(x)) for row in table])
    more = [np.array([seconds(row, _figures(x * (1 + 0.02 * axis))) for row in table]) for axis in np.eye(len(x))]
    slopes = np.stack([(then - now) / (0.02 * one) for then, one in zip(more, x, strict=True)], axis=1)
    return Lines((now - slopes @ x) / measured, slopes / measured[:, None])


def fit(of: Lines, x: Vector) -> Vector:
    """The reciprocals with the least sum of absolute relative errors: squares, weighted again until they settle."""
    for _ in range(60):
        weights = 1 / np.sqrt(np.maximum(np.abs(of.at(x) - 1), 0.005))
        found, *_ = np.linalg.lstsq(of.slopes * x * weights[:, None], (1 - of.base) * weights, rcond=None)
        x = x * np.clip(found, 0.3, 3.0)  # positive, whatever rows are left out
    return x


class Fit(NamedTuple):
    """Of one kind of GPU. errors, row_out, model_out: of tokens/s of each row in percent: seen, left out, and with its
    model left out"""

    figures: Figures
    rows: list[Row]
    errors: Vector
    row_out: Vector
    model_out: Vector


def fit_kind(kind: str, table: list[Row]) -> Fit:
    """The fit to the rows of a kind of GPU."""
    own = [row for row in table if row.gpu == kind]
    x = 1 / np.array(START[kind])
    of = lines(own, x)
    x = fit(of, x)
    errors = 100 * (1 / of.at(x) - 1)
    return Fit(
        _figures(x), own, errors, _left_out(own, of, x, lambda row: row), _left_out(own, of, x, lambda r: r.model)
    )


def _left_out(table: list[Row], of: Lines, x: Vector, alike: Callable[[Row], object]) -> Vector:
    out, keys = np.zeros(len(table)), [alike(row) for row in table]
    for key in dict.fromkeys(keys):
        left = np.array([other == key for other in keys])
        out[left] = 100 * (1 / of.at(fit(of.without(left), x))[left] - 1)
    return out


def fit_all(table: list[Row]) -> dict[str, Fit]:
    """By kind of GPU."""
    return {kind: fit_kind(kind, table) for kind in KINDS}
