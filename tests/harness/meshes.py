"""Meshes by their axes, and those of four ranks by name; made on the ranks, since a mesh cannot travel there."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

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
def mesh_of(**axes: int) -> Any:
    """A mesh of all ranks, with these axes: `mesh_of(stage=2)`."""
    return ya.mesh(device="cpu", **axes)


@functools.cache
def made(name: str) -> Any:
    """The mesh, on fewer ranks with axes that fit: one node, one replica."""
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if not dist.is_initialized() else dist.get_world_size()
    return ya.mesh(device="cpu", **{axis: size if ranks % size == 0 else 1 for axis, size in MESHES[name].items()})
