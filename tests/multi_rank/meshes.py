"""Meshes of four ranks, by name: they are made on the ranks, since a mesh cannot travel there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import yafsdp_fn as ya

MESHES: dict[str, dict[str, int]] = {
    "shard": {},
    "replicate": {"replicate": 2},
    "copies": {"replicate": -1, "shard": 1},
    "nodes": {"local": 2},
    "replicate-nodes": {"replicate": 2, "local": 1},
}
"""Options of `ya.mesh`."""


def on(mesh: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(mesh, *args)` on another mesh of the same ranks: `pools[4].run(on, "replicate", function, *args)`."""
    return function(made(name), *args)


@functools.cache
def made(name: str) -> Any:
    return ya.mesh(device="cpu", **MESHES[name])
