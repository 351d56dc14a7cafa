"""Errors of predicted runs (`steps.py`): by source, GPU, number of GPUs and parallelism, and with each source left out.

left_out(found)      the rate of products fitted to all other sources, and each run's error by it
interval(errors)     what four fifths of them are between
show(file, ...)      what `python -m benchmarks published --rows FILE` and `--sources` print
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.runs import Refused, Run, table
from benchmarks.published.steps import Predicted, cluster_of, predict, seconds
from train.config import ConfigError
from yafsdp_fn.planner import Cluster
from yafsdp_fn.util.words import counted

# ---- Leaves a source out: the products of each family of GPUs, fitted to all other sources.

FAMILIES = {"A100": ("A100", "A100 40GB"), "H100": ("H100", "H100 HBM2e", "H200")}
"""The GPUs that share a fit: of one factor on the rate of their products. Other kinds have theirs from data sheets."""
FACTORS = np.linspace(0.6, 1.6, 401)


def left_out(
    found: list[Predicted], slower: list[float]
) -> tuple[dict[str, dict[str, float]], list[tuple[Predicted, float]]]:
    """(Factors on the rate of products by family and source left out, "" for none; each measured run with its error in
    percent when its source is left out). Sources count alike, whatever their rows; absolute logarithms of errors.

    slower: seconds of each of `found` at a rate of products that is a tenth lower (`_slower`), of those with a time
    """
    factors: dict[str, dict[str, float]] = {}
    errors = [one.error for one in found]
    for family, kinds in FAMILIES.items():
        chosen = [at for at, one in enumerate(found) if one.run.gpu in kinds and one.run.measured_s is not None]
        if not chosen:
            continue
        measured = np.array([found[at].run.measured_s for at in chosen])
        now = np.array([found[at].seconds for at in chosen])
        then = np.array([slower[at] for at in chosen])
        times = now + (then - now) * 10 * (1 / FACTORS[:, None] - 1)  # [factors, rows]: straight in the reciprocal
        sources = [found[at].run.source for at in chosen]
        weights = np.array([1 / sources.count(source) for source in sources])
        factors[family] = {}
        for source in ["", *dict.fromkeys(sources)]:
            kept = weights * np.array([other != source for other in sources])
            cost = np.abs(np.log(times / measured)) @ kept
            if not kept.any():
                cost = np.abs(FACTORS - 1)
            best = int(cost.argmin())
            factors[family][source] = round(float(FACTORS[best]), 4)
            for at, other, of, seen in zip(chosen, sources, times[best], measured, strict=True):
                if other == source:
                    errors[at] = 100 * (seen / of - 1)
    return factors, [(one, error) for one, error in zip(found, errors, strict=True) if error is not None]


def _slower(cluster: Cluster) -> Cluster:
    return cluster.replace(matmul_flops=cluster.matmul_flops / 1.1)


def interval(errors: list[tuple[Predicted, float]], part: float = 0.8) -> tuple[float, float]:
    """Measured over predicted seconds, between which `part` of the runs are, sources counting alike: what a source says
    of itself is more than its rows are."""
    sources = [one.run.source for one, _ in errors]
    ratios = sorted(
        (1 + error / 100, 1 / sources.count(source)) for (_, error), source in zip(errors, sources, strict=True)
    )
    below = np.cumsum([weight for _, weight in ratios]) / len(set(sources))
    low, high = (ratios[int(np.searchsorted(below, at))][0] for at in ((1 - part) / 2, (1 + part) / 2))
    return round(low, 3), round(high, 3)


# ---- Prints the errors.

MARGIN = 1.05
"""The bytes that an allocator holds over those of tensors, at the least: of torch's own figures 1.03 to 1.12."""


def fitting(found: list[Predicted]) -> tuple[int, int]:
    """(Runs of which it is said rightly whether they fit, all whose memory is known)."""
    known = [one for one in found if one.run.measured_bytes is not None]
    right = [
        (one.peak_bytes * MARGIN <= cluster_of(one.run).memory_bytes) == (one.run.measured_bytes != float("inf"))
        for one in known
    ]
    return sum(right), len(right)


def spread(errors: Iterable[float]) -> dict[str, float]:
    """Number, median, 90th percentile and largest of absolute errors, and the median of errors with their sign."""
    found = np.array([*errors])
    sizes = np.abs(found)
    numbers = {"median": np.median(sizes), "p90": np.percentile(sizes, 90), "largest": sizes.max()}
    numbers["bias"] = np.median(found)
    return {"rows": len(sizes), **{name: round(float(value), 2) for name, value in numbers.items()}}


def _at_most(run: Run) -> str:
    """The power of eight that the number of GPUs is within."""
    for most in (1, 8, 64, 512):
        if run.gpus <= most:
            return str(most)
    return "more"


GROUPS: dict[str, Callable[[Run], str]] = {
    "source": lambda run: run.source,
    "gpu": lambda run: run.gpu,
    "gpus": _at_most,
    "parallelism": lambda run: run.parallelism,
    "kernels": lambda run: run.kernels,
}


def show(file: Path, as_json: bool, sources: bool = False) -> None:
    """Predicts the rows of a file; sources: each with its source left out of the fit. Raises ConfigError where none can
    be."""
    try:
        every, refused = table(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rows: {error}") from None
    found = list[Predicted]()
    slower = list[float]()
    if not as_json:
        print(HEADING)
    for run in every:
        try:
            one = predict(run)
        except Refused as error:
            refused.append(str(error))
            continue
        found.append(one)
        run = one.run  # with what was not stated
        fitted = sources and run.measured_s is not None
        slower.append(seconds(run, _slower(cluster_of(run))) if fitted else 0.0)  # while its programs are at hand
        if not as_json:
            print(_line(one), flush=True)
    if not found:
        raise ConfigError(f"--rows: {refused[0] if refused else f'{file} has no rows'}")
    right, known = fitting(found)
    told: dict[str, Any] = {"fits or not": {"right": right, "of": known}}
    apart = [(one, one.error) for one in found if one.error is not None]
    if sources and apart:
        factors, apart = left_out(found, slower)
        told |= {"factors on products": factors, "80% of measured over predicted": interval(apart)}
    spreads = by_groups(apart)
    if as_json:
        listed = {} if sources else {"rows": [one.as_json() for one in found]}
        print(json.dumps({**told, "spreads": spreads, **listed, "not predicted": refused}, indent=1))
        return
    for name, group in spreads.items():
        print(f"\nby {name}" if name != "all" else "")
        print_spreads(group)
    print(f"\nwhether a run fits is said rightly of {right} of {known}")
    for name, what in told.items():
        if name != "fits or not":
            print(f"{name}: {what}")
    for why in refused:
        print(f"not predicted: {why}")


def by_groups(errors: Sequence[tuple[Predicted, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """The spreads of all errors, and by each of `GROUPS`; of none where there are no errors."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    if errors:
        found["all"] = {"all": spread(error for _, error in errors)}
    for name, key in GROUPS.items():
        groups: dict[str, list[float]] = {}
        for one, error in sorted(errors, key=lambda each: key(each[0].run)):
            groups.setdefault(key(one.run), []).append(error)
        found[name] = {of: spread(each) for of, each in groups.items()}
    return found


def print_spreads(found: Mapping[str, Mapping[str, float]]) -> None:
    """A line for each."""
    for name, of in found.items():
        words = f"median {of['median']:5.2f}%   p90 {of['p90']:5.2f}%   largest {of['largest']:5.2f}%"
        print(f"{name:<34} {counted(int(of['rows']), 'row'):>9}   {words}   bias {of['bias']:+5.2f}%")


HEADING = f"{'':<89} {'step, s':>8} {'measured, error':>16} {'tokens/s/GPU':>12} {'GiB':>6} {'seen':>6}"


def _line(one: Predicted) -> str:
    run = one.run
    seen = "" if one.error is None else f"{run.measured_s:8.3f} {one.error:+6.1f}%"
    held = "" if run.measured_bytes is None else f"{run.measured_bytes / 2**30:6.1f}"
    over = "" if one.fits else "  does not fit"
    memory = f"{one.peak_bytes / 2**30:6.1f} {held:>6}{over}"
    return f"{run.source[:14]:<14} {run!s:<74} {one.seconds:8.3f} {seen:>16} {one.tokens_per_s:12.0f} {memory}"
