"""The figures of LLM Foundry's kinds of GPU, fitted, and its runs on more nodes: `python -m benchmarks published --fit`
and `--register`.

--fit        three figures of a kind of GPU, from the committed rows; errors seen, with a row left out, with a model
             left out
--register   each run on eight GPUs again on 16 to 512, with the same micro-batch and accumulation, as a CSV; and 70B,
             which does not fit eight: recomputed, one micro-batch a step, of the largest power of two of sequences that
             leaves a tenth of a card free

seconds(run, x)   close to a straight line in x, the reciprocals of the rates: simulated once, and once per figure
fit               least absolute relative errors on these lines, which no row that went wrong can bend
left out          fitted without a row, or without all rows of a model; predicted by the row's own line

Errors are predicted over measured tokens/s, less one, in percent; medians and 90th percentiles are of absolute errors.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.published import foundry
from benchmarks.published.errors import print_spreads, spread
from benchmarks.published.foundry import KINDS, MEASURED, TABLE
from benchmarks.published.runs import Run, table
from benchmarks.published.steps import memory, predict, seconds

NAMES = ("matmul_flops", "attention_flops", "memory_bandwidth")
START = {
    "a100_40gb": (2.69e14, 0.970e14, 0.790e12),
    "a100_80gb": (3.13e14, 0.981e14, 0.734e12),
    "h100_80gb": (8.68e14, 1.77e14, 1.22e12),
}
"""Points at which the lines are taken: near the fit, so that they are its own."""
Vector = NDArray[np.float64]


def measured() -> list[Run]:
    """The committed runs. Raises ValueError for one that cannot be predicted."""
    runs, refused = table(TABLE, foundry.read)
    if refused:
        raise ValueError(refused[0])
    return runs


def show_fit(as_json: bool) -> None:
    """Fits the figures to the committed rows."""
    runs = measured()
    fits = {kind: fit_kind(kind, runs) for kind in KINDS}
    figures = {kind: {name: float(f"{value:.4g}") for name, value in of.figures.items()} for kind, of in fits.items()}
    spreads = {
        "seen": _spreads({kind: of.errors for kind, of in fits.items()}),
        "row left out": _spreads({kind: of.row_out for kind, of in fits.items()}),
        "model left out": _spreads({kind: of.model_out for kind, of in fits.items()}),
    }
    if as_json:
        print(json.dumps({"figures": figures, **spreads}, indent=1))
        return
    for kind, of in figures.items():
        print(f"{kind:<12}", ", ".join(f"{name} {value:.4g}" for name, value in of.items()))
    for words, found in spreads.items():
        print(f"\n{words}")
        print_spreads(found)


def _spreads(errors: dict[str, Vector]) -> dict[str, dict[str, float]]:
    """The spread of each kind of GPU, and of all."""
    return {kind: spread(each) for kind, each in errors.items()} | {"all": spread(np.concatenate([*errors.values()]))}


class Lines(NamedTuple):
    """Seconds over those measured, of each row, as `base + slopes @ x`. base: [rows]; slopes: [rows, figures]"""

    base: Vector
    slopes: Vector

    def at(self, x: Vector) -> Vector:
        return self.base + self.slopes @ x

    def without(self, left: NDArray[np.bool_]) -> Lines:
        return Lines(self.base[~left], self.slopes[~left])


def _figures(x: Vector) -> dict[str, float]:
    return dict(zip(NAMES, (1 / x).tolist(), strict=True))


def lines(runs: Sequence[Run], x: Vector) -> Lines:
    """The lines of runs that were measured, around `x`."""

    def at(x: Vector) -> Vector:
        return np.array([seconds(run, KINDS[run.gpu].replace(**_figures(x))) for run in runs])

    measured, now = np.array([run.measured_s for run in runs], float), at(x)
    more = [at(x * (1 + 0.02 * axis)) for axis in np.eye(len(x))]
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

    figures: dict[str, float]
    errors: Vector
    row_out: Vector
    model_out: Vector


def fit_kind(kind: str, runs: Sequence[Run]) -> Fit:
    """The fit to the rows of a kind of GPU."""
    own = [run for run in runs if run.gpu == kind]
    x = 1 / np.array(START[kind])
    of = lines(own, x)
    x = fit(of, x)
    errors = 100 * (1 / of.at(x) - 1)
    row_out, model_out = left_out(own, of, x, lambda run: run), left_out(own, of, x, lambda run: run.name)
    return Fit(_figures(x), errors, row_out, model_out)


def left_out(runs: Sequence[Run], of: Lines, x: Vector, alike: Callable[[Run], object]) -> Vector:
    """Errors of each run, fitted without those that are `alike`."""
    out, keys = np.zeros(len(runs)), [alike(run) for run in runs]
    for key in dict.fromkeys(keys):
        left = np.array([other == key for other in keys])
        out[left] = 100 * (1 / of.at(fit(of.without(left), x))[left] - 1)
    return out


GPUS = (16, 32, 64, 128, 256, 512)
PREDICTED = "predicted_tokens_per_s_per_gpu"
LENGTHS_OF_70B = (2048, 8192)


def largest(gpu: str, gpus: int, seq_len: int) -> Run | None:
    """70B's run, None where one sequence is too many."""
    found = None
    for micro_batch in (1, 2, 4, 8, 16, 32):
        run = foundry.run("70b", gpu, gpus, seq_len, micro_batch, 1, recompute=True)
        if memory(run) > 0.9 * KINDS[gpu].memory_bytes:
            return found
        found = run
    return found


def registered() -> list[Run]:
    """The runs, of nobody's measurement."""
    seen = dict.fromkeys(run._replace(measured_s=None, at="") for run in measured())
    again = [run._replace(gpus=gpus) for run in seen for gpus in GPUS]
    more = [largest(gpu, gpus, length) for gpu in KINDS for gpus in GPUS for length in LENGTHS_OF_70B]
    return [*again, *(run for run in more if run is not None)]


def show_registered() -> None:
    """Writes the columns that `--rows` reads, without measured values, and what is predicted."""
    out = None
    for run in registered():
        line = _line(run)
        if out is None:
            out = csv.DictWriter(sys.stdout, [*line], lineterminator="\n")
            out.writeheader()
        out.writerow(line)


def _line(run: Run) -> dict[str, Any]:
    return {
        "Model": run.name,
        "SeqLen (T)": run.seq_len,
        "# GPUs": run.gpus,
        "GPU": run.gpu,
        "MicroBatchSize": run.micro_batch,
        "GradAccum": run.accumulation,
        "GlobalBatchSize": run.micro_batch * run.accumulation * run.gpus,
        MEASURED: "",
        "Precision": "amp_fp8" if run.fp8 else "bf16" if run.gpu == "a100_40gb" else "amp_bf16",
        "Sharding Strategy": foundry.KEPT if run.kept else "FULL_SHARD",
        "Activation Checkpointing": run.recompute == "all",
        "NumParams": run.config.num_parameters,
        PREDICTED: f"{predict(run).tokens_per_s:.1f}",
    }
