"""`python -m benchmarks ablate`: what each feature buys, with all the others in place.

    full = zero3-unroll2                               # the set to ablate
    for feature in FEATURES:
        the set without it, or with it if it is not in the set
    time them all in turn, step by step                # the same processes, as every run of this command

A group of contenders is timed at once, as many as fit into memory; the full set is in each, so that ratios compare.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import harness, steps
from benchmarks.options import Bench, ConfigName, Timed
from benchmarks.report import Rows, apart, check_losses, spread, table

FULL = {
    "A": "zero3-unroll2",
    "B": "zero3-unroll2",
    "C": "zero3-unroll8",
    "tiny": "zero3-update",
}
"""The set that is ablated unless --full says otherwise."""

FEATURES = {
    "noexchange": "sends and receives in place of gloo's collectives",
    "nolinear": "weight gradients straight into their slot",
    "nofused": "the fused optimizer",
    "update": "the optimizer's step inside the program",
    "resident2": "the last two layers kept",
    "prefetch0": "gathers one compute ahead",
    "prefetch2": "gathers two computes ahead",
    "unroll2": "two layers one visit",
    "compile": "a compiled block",
}
"""Word of a contender's name: what is measured. With no... and prefetch0 the word takes the feature away."""

AGAINST = ("noexchange", "nolinear", "nofused", "prefetch0")


@dataclasses.dataclass(frozen=True)
class Ablate(Timed):
    """Time a full set of features, and that set with one feature less, or one more, interleaved step by step."""

    config: ConfigName = "A"
    """The model, as in `python -m benchmarks`."""
    full: str = ""
    """The set: the name of a contender of ours. Default: what is best for the model."""
    features: tuple[str, ...] = tuple(FEATURES)
    """Words of names (benchmarks/names.py). One that is in the set is left out, any other is added;
    one with a number replaces another number."""
    ranks: int = 2
    """Rank processes, with gloo."""
    timeout: float = 1800.0
    """Seconds after which rank processes that have not ended are killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"--features {' '.join(self.features)}: expected one or more, each once")
        for variant in self.variants:
            self.bench((self.name, variant.name))  # refuses what cannot be built

    @property
    def name(self) -> str:
        return self.full or FULL[self.config]

    @property
    def variants(self) -> list[Variant]:
        return [variant(self.name, feature) for feature in self.features]

    def bench(self, contenders: Sequence[str]) -> Bench:
        """The timing of some contenders."""
        return Bench(
            config=self.config,
            schedules=tuple(contenders),
            peers=(),
            ranks=self.ranks,
            steps=self.steps,
            warmup=self.warmup,
            counts=False,
            timeout=self.timeout,
        )


class Variant(NamedTuple):
    """The full set but for one feature. in_full_set: whether it is in the full set, so that the variant lacks it"""

    feature: str
    name: str
    in_full_set: bool


def variant(full: str, feature: str) -> Variant:
    """The set `full` with `feature` left out if it is there, else added."""
    words, bare = full.split("-"), feature.rstrip("0123456789")
    if feature in words:
        return Variant(feature, "-".join(word for word in words if word != feature), in_full_set=feature not in AGAINST)
    kept = [word for word in words if bare == feature or word.rstrip("0123456789") != bare]
    return Variant(feature, "-".join([*kept, feature]), in_full_set=feature in AGAINST)


def groups(ablate: Ablate, available: int | None) -> Iterator[tuple[str, ...]]:
    """Contenders that are timed together: the full set first, then as many as fit into `available` bytes."""
    full = ablate.name
    group: tuple[str, ...] = (full,)
    for each in ablate.variants:
        if len(group) > 1 and steps.too_much(ablate.bench((*group, each.name)), available):
            yield group
            group = (full,)
        group = (*group, each.name)
    yield group


def measure(ablate: Ablate, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed, LossesDiffer, and `report.TooMuch` where not even two contenders fit."""
    full = ablate.name
    rows: dict[str, dict[str, Any]] = {}
    seconds: list[float] = []
    losses: dict[str, float] = {}
    for group in groups(ablate, steps.available_bytes()):
        bench = ablate.bench(group)
        steps.check(bench)
        with console.status(f"timing {', '.join(group)} in turn"):
            timed = harness.run("benchmarks.steps:time", group, **bench.turns)
        losses |= timed["losses"]
        seconds += timed["seconds"][full]
        for each in ablate.variants:
            if each.name in group:
                rows[each.feature] = row(each, timed["seconds"][each.name], timed["seconds"][full])
    check_losses(losses)
    return {
        "full": full,
        "step_ms": spread([1e3 * s for s in seconds]),
        "features": dict(sorted(rows.items(), key=lambda item: -item[1]["buys_percent"]["median"])),
    }


def row(each: Variant, seconds: Sequence[float], full: Sequence[float]) -> dict[str, Any]:
    """One feature. buys_percent: of the step without it, step by step."""
    ratios = [a / b for a, b in zip(seconds, full, strict=True)]
    buys = [100 * (1 - 1 / ratio if each.in_full_set else 1 - ratio) for ratio in ratios]
    return {
        "measured": FEATURES.get(each.feature, f"-{each.feature}"),
        "name": each.name,
        "in_full_set": each.in_full_set,
        "step_ms": 1e3 * statistics.median(seconds),
        "over_full": spread(ratios),
        "buys_percent": spread(buys),
    }


def show(ablate: Ablate, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each feature."""
    step = found["step_ms"]
    yield (
        f"config {ablate.config}, {ablate.ranks} rank(s): {found['full']} takes {step['median']:.1f} ms "
        f"({apart(step, 1)}), {ablate.steps} interleaved steps. Each feature is switched alone; "
        "what it buys is a share of the step without it"
    )
    rows: Rows = {}
    for each in found["features"].values():
        over, buys = each["over_full"], each["buys_percent"]
        rows[each["measured"]] = {
            "in the set": "yes" if each["in_full_set"] else "no",
            "timed": each["name"],
            "step ms": f"{each['step_ms']:.1f}",
            "over the set": f"{over['median']:.3f}",
            "p10 - p90": apart(over),
            "buys %": f"{buys['median']:+.1f}",
            "p10 to p90": f"{buys['p10']:+.1f} to {buys['p90']:+.1f}",
        }
    yield table("feature", rows)
