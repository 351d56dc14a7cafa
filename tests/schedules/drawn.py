"""Random schedules: every builder with random options, and a mesh that it fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.schedules.cases import EVERYTHING
from yafsdp_fn.schedules import Schedule, ddp, hpz, hsdp, remat, zero1, zero2, zero3

REMATS = {
    "none": remat.none,
    "all": remat.all,
    "first": remat.first(1),
    "every": remat.every(2),
    "offload": remat.offload(EVERYTHING, ahead=0),
    "offload ahead": remat.offload(EVERYTHING, ahead=1),
    "offload every": remat.offload(remat.every(2), recompute=remat.all),
}


ON_STAGES = [name for name in REMATS if "offload" not in name]


def builder(rng: random.Random, update: bool, remats: Sequence[str] = tuple(REMATS)) -> tuple[Schedule, str]:
    """Any builder with any options, and a mesh that it fits."""
    options: dict[str, Any] = {"remat": REMATS[rng.choice(remats)], "update": update}
    prefetch = {"prefetch": rng.randrange(4)}
    defer = {"defer": rng.random() < 0.5}
    name = rng.choice(("zero1", "zero2", "zero3", "ddp", "hsdp", "hpz"))
    meshes = ("one rank", "ranks", "replicas", "nodes", "replicas and nodes", "replicas of the whole")
    if name == "ddp":
        return ddp(**options), rng.choice(("one rank", "replicas of the whole"))
    if name == "hpz":
        return hpz(rng.randrange(6), **prefetch, **defer, **options), rng.choice(("nodes", "replicas and nodes"))
    if name in ("zero1", "zero2"):
        return {"zero1": zero1, "zero2": zero2}[name](**prefetch, **options), rng.choice(meshes)
    options |= {"resident": rng.randrange(4), **prefetch, **defer}
    if name == "hsdp":
        return hsdp(**options), rng.choice(("replicas", "replicas and nodes", "replicas of the whole"))
    return zero3(**options), rng.choice(meshes)
