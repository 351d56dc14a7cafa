"""Meshes with a short timeout, each on process groups of its own, so that a test may break one and go on.

Functions of a pool run in processes that live on: a collective that fails on the pool's own mesh would end it.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.dist import groups
from yafsdp_fn.dist.collectives import GlooGroup, Group
from yafsdp_fn.dist.communicators import communicators

TIMEOUT = 3.0
"""Seconds after which a collective without its peers raises."""

_numbers = itertools.count()  # meshes of equal axes count as one; all ranks make the same ones in the same order


def breakable(seconds: float = TIMEOUT, ranks: int | None = None) -> Any:
    """A mesh over all ranks, or the first few, that no other test uses; None elsewhere. Every rank calls this."""
    members = list(range(dist.get_world_size() if ranks is None else ranks))
    group = dist.new_group(members, timeout=timedelta(seconds=seconds), backend="gloo")
    name = f"mesh{next(_numbers)}"
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)) if dist.get_rank() in members else None


def breakable_stages(stages: int, seconds: float = TIMEOUT, tensor: int = 1) -> Any:
    """The same with stages, over all ranks. tensor: ranks of that axis"""
    ranks = torch.arange(dist.get_world_size()).view(stages, -1, tensor)
    names = ("stage", "shard", "tensor")
    ranks, names = (ranks, names) if tensor > 1 else (ranks[..., 0], names[:2])
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)  # with communicators of its own
    with pytest.MonkeyPatch.context() as patch:  # meshes of several axes have the timeout of the process group
        patch.setattr(groups, "timeout_of", lambda *_: timedelta(seconds=seconds))
        communicators(mesh)
    return mesh


@contextmanager
def by_the_backend() -> Iterator[None]:
    """Ranks communicate as those of NCCL do: by the collectives of the backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gathers", "reduce_scatters", "all_to_all"):
            patch.setattr(GlooGroup, name, getattr(Group, name))
        yield


def outcome(run: Callable[[], Any]) -> str:
    """The last part of the traceback that `run` ends in, notes included; 'returned' where it does not raise."""
    try:
        run()
    except BaseException as error:
        return "".join(traceback.format_exception_only(error))
    return "returned"
