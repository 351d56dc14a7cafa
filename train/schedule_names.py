"""Names of schedules: a builder, with its options after dashes, as in zero3-resident2-update."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import yafsdp_fn as ya
from train.config import SCHEDULES

BUILDERS = (*SCHEDULES, "fsdp2")
NUMBERED = ("resident", "prefetch", "chunk")
HALVES = {"hsdp": "two copies of the state", "hpz": "two nodes"}
"""Builders that cut the ranks in two, and into what."""


def parse(name: str, flag: str = "--schedules", *, more: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """`(builder, options)`. Raises ValueError for a builder, an option or a pair of options that does not exist.

    flag: where the name was given, for errors; more: what else names take there, as errors show it
    """
    builder, *words = name.split("-")
    if builder not in BUILDERS:
        raise ValueError(f"{flag} {name}: there is no builder {builder!r}; there are {', '.join(BUILDERS)}")
    options: dict[str, Any] = {}
    for word in words:
        option = word.rstrip("0123456789")
        number = re.sub(r"\D", "", word)
        takes = option in NUMBERED
        if option not in _options(builder) or option in options or takes != bool(number):
            raise ValueError(
                f"{flag} {name}: {builder} does not take -{word} here; it takes each of "
                f"{', '.join([*(_shown(o) for o in _options(builder)), *more])} once"
            )
        options[option] = int(number) if takes else ya.schedules.remat.all if option == "remat" else True
    if options.get("chunk", 2) < 2:
        raise ValueError(f"{flag} {name}: expected two or more chunks; one is {builder} without -chunkN")
    if "chunk" in options and "remat" in options:
        raise ValueError(
            f"{flag} {name}: chunks are recomputed anyway, and with -remat a layer would run its forward a third "
            "time; leave one of them out"
        )
    return builder, options


def _options(builder: str) -> list[str]:
    parameters = inspect.signature(getattr(ya.schedules, builder)).parameters.values()
    said = [p for p in parameters if p.name in NUMBERED or p.default in (False, "none")]
    return [*(p.name for p in said if p.kind is p.KEYWORD_ONLY), "chunk"]


def _shown(option: str) -> str:
    return f"-{option}{'N' if option == 'chunk' else 'K'}" if option in NUMBERED else f"-{option}"


def check_ranks(name: str, ranks: int) -> None:
    """Raises ValueError where the mesh of schedule `name` cannot be made of so many ranks."""
    builder, _ = parse(name)
    if builder in HALVES and ranks % 2:
        raise ValueError(
            f"--schedules {name} with --ranks {ranks}: {builder} makes {HALVES[builder]} of the ranks here, and needs "
            "an even number of them"
        )


def mesh(name: str, ranks: int) -> dict[str, Any]:
    """The arguments of `ya.mesh` that the schedule needs."""
    builder, _ = parse(name)
    made = {"ddp": {"replicate": ranks, "shard": 1}, "hsdp": {"replicate": 2}, "hpz": {"local": ranks // 2}}
    return made.get(builder, {})


def check_chunks(name: str, microbatches: int, rows: int) -> None:
    """Raises ValueError where schedule `name` cuts a rank's rows into unequal parts, or into other parts than the
    contenders beside it."""
    chunks = parse(name)[1].get("chunk", microbatches)
    if microbatches > 1 and chunks != microbatches:
        raise ValueError(
            f"--schedules {name} with --microbatches {microbatches}: -chunk{microbatches} does as many in layer-major "
            "order, on the same rows; without --microbatches any number is compared with the whole batch"
        )
    if rows % chunks:
        raise ValueError(
            f"--schedules {name}: a rank's {rows} sequence(s) do not divide into {chunks} chunks (--batch)"
        )


def split(name: str, microbatches: int) -> tuple[int, int]:
    """`(microbatches, chunks)` that schedule `name` cuts the rows of a rank into: in depth order, or layer-major."""
    chunks = parse(name)[1].get("chunk", 1)
    return (1 if chunks > 1 else microbatches), chunks


def make(name: str, layers: int, **more: Any) -> ya.schedules.Schedule:
    """The schedule called `name`, for a model of so many layers; more: options that names cannot say."""
    builder, options = parse(name)
    options |= more
    options.pop("chunk", None)
    factory: Callable[..., ya.schedules.Schedule] = getattr(ya.schedules, builder)
    return factory(layers, **options) if builder == "hpz" else factory(**options)
