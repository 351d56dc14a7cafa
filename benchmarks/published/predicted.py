"""Runs of LLM Foundry predicted, and the fit that does it: `python -m benchmarks published --rows FILE.csv`, `--fit`,
`--register`.

--rows       each row of the file with the committed figures; errors where it says what was measured; and which rows are
             of what is not modelled
--fit        three figures of a kind of GPU, from the committed rows; errors seen, with a row left out, with a model
             left out
--register   each run on eight GPUs again on 16 to 512, with the same micro-batch and accumulation, as a CSV; and 70B,
             which does not fit eight: recomputed, one micro-batch a step, of the largest power of two of sequences that
             leaves a tenth of a card free

seconds(row, x)   close to a straight line in x, the reciprocals of the rates: simulated once, and once per figure
fit               least absolute relative errors on these lines, which no row that went wrong can bend
left out          fitted without a row, or without all rows of a model; predicted by the row's own line

Errors are predicted over measured tokens/s, less one, in percent; medians and 90th percentiles are of absolute errors.
"""

from __future__ import annotations

import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.published import foundry
from benchmarks.published.foundry import (
    KINDS,
    MEASURED,
    TABLE,
    Figures,
    Row,
    lines_of,
    peak,
    row,
    rows,
    seconds,
    tokens_per_s,
)
from train.config import ConfigError
from yafsdp_fn.util.words import counted


class Predicted(NamedTuple):
    """A row as the planner predicts it. tokens_per_s: of a GPU; peak_bytes: of one, as the planner counts them"""

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
    """Predicts a row with the committed figures."""
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
        print(f"{name:<12} {counted(of['rows'], 'row'):>9}   {words}")


FITTED = TABLE.with_name("llm_foundry_fit.json")
NAMES = ("matmul_flops", "attention_flops", "memory_bandwidth")
START = {
    "a100_40gb": (2.69e14, 0.970e14, 0.790e12),
    "a100_80gb": (3.13e14, 0.981e14, 0.734e12),
    "h100_80gb": (8.68e14, 1.77e14, 1.22e12),
}
"""Points at which the lines are taken: near the fit, so that they are its own."""
Vector = NDArray[np.float64]


@functools.cache
def fitted() -> dict[str, Figures]:
    """The figures that are committed, by kind of GPU: `python -m benchmarks published --fit --json` has made them."""
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
    """The lines of rows that were measured, around `x`."""
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
    """The fit of one kind of GPU. errors, row_out, model_out: of tokens/s of each row in percent: seen, left out, and
    with its model left out"""

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
    """The fits by kind of GPU."""
    return {kind: fit_kind(kind, table) for kind in KINDS}


GPUS = (16, 32, 64, 128, 256, 512)
PREDICTED = "predicted_tokens_per_s_per_gpu"
LENGTHS_OF_70B = (2048, 8192)


def largest(gpu: str, gpus: int, seq_len: int) -> Row | None:
    """70B's run, None where one sequence is too many."""
    found = None
    for micro_batch in (1, 2, 4, 8, 16, 32):
        run = Row("70b", gpu, gpus, seq_len, micro_batch, 1, recompute=True, fp8=False)
        if peak(run).peak_bytes > 0.9 * KINDS[gpu].memory_bytes:
            return found
        found = run
    return found


def table() -> list[Row]:
    """The rows, of nobody's measurement."""
    seen = dict.fromkeys(run._replace(measured=None) for run in rows())
    again = [run._replace(gpus=gpus) for run in seen for gpus in GPUS]
    more = [largest(gpu, gpus, length) for gpu in KINDS for gpus in GPUS for length in LENGTHS_OF_70B]
    return [*again, *(run for run in more if run is not None)]


def show_registered() -> None:
    """Writes the columns that `--rows` reads, without measured values, and what is predicted."""
    first = ["Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "GlobalBatchSize", MEASURED]
    rest = ["Precision", "Sharding Strategy", "Activation Checkpointing", "NumParams", PREDICTED]
    out = csv.DictWriter(sys.stdout, [*first, *rest], lineterminator="\n")
    out.writeheader()
    for run in table():
        out.writerow(_line(run))


def _line(run: Row) -> dict[str, Any]:
    return {
        "Model": run.model,
        "SeqLen (T)": run.seq_len,
        "# GPUs": run.gpus,
        "GPU": run.gpu,
        "MicroBatchSize": run.micro_batch,
        "GradAccum": run.accumulation,
        "GlobalBatchSize": run.micro_batch * run.accumulation * run.gpus,
        "Precision": "amp_fp8" if run.fp8 else "bf16" if run.gpu == "a100_40gb" else "amp_bf16",
        "Sharding Strategy": foundry.KEPT if run.kept else "FULL_SHARD",
        "Activation Checkpointing": run.recompute,
        "NumParams": foundry.mpt_config(run.model, run.seq_len).num_parameters,
        PREDICTED: f"{tokens_per_s(run, fitted()[run.gpu]):.1f}",
    }
