"""Names of our schedules on the command line: a builder, and options after dashes.

    zero3                      ya.schedules.zero3()
    zero3-resident2-update     ya.schedules.zero3(resident=2, update=True)

    -update -defer -remat      update=True, defer=True, remat=ya.remat.all, where the builder takes it
    -residentK -prefetchK      resident=K, prefetch=K

hpz keeps all layers in the node. A builder brings its mesh: ddp a copy per rank, hsdp two copies, hpz two nodes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import yafsdp_fn as ya

BUILDERS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")
HALVES = {"hsdp": "two copies of the state", "hpz": "two nodes"}
"""What cuts the ranks in two."""


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """`(builder, its options)`. Raises ValueError for a builder or an option that does not exist."""
    builder, *words = name.split("-")
    if builder not in BUILDERS:
        raise ValueError(f"--schedules {name}: there is no builder {builder!r}; there are {', '.join(BUILDERS)}")
    options: dict[str, Any] = {}
    for word in words:
        option, number = word.rstrip("0123456789"), re.sub(r"\D", "", word)
        takes = option in ("resident", "prefetch")
        if option not in _options(builder) or option in options or takes != bool(number):
            raise ValueError(
                f"--schedules {name}: {builder} does not take -{word} here; it takes each of "
                f"{', '.join(_shown(o) for o in _options(builder))} once"
            )
        options[option] = int(number) if takes else ya.remat.all if option == "remat" else True
    return builder, options


def _options(builder: str) -> list[str]:
    parameters = inspect.signature(getattr(ya.schedules, builder)).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _shown(option: str) -> str:
    return f"-{option}K" if option in ("resident", "prefetch") else f"-{option}"


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


def make(name: str, layers: int) -> ya.schedules.Schedule:
    """The schedule called `name`, for a model of so many layers."""
    builder, options = parse(name)
    factory: Callable[..., ya.schedules.Schedule] = getattr(ya.schedules, builder)
    return factory(layers, **options) if builder == "hpz" else factory(**options)
