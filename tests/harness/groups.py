"""Meshes on process groups of their own, so that a test may break one and go on; and the calls that break them.

    mesh = breakable()                      # whose ranks wait for each other for long, on a busy machine too
    step(state(mesh), batch)                # what ranks import and compile at first is behind them
    outcome(lambda: step(now, batch), SOON) # the text of the error of a rank for which another one does not come

Functions of a pool run in processes that live on: a collective that fails on the pool's own mesh would end it.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from yafsdp_fn.communication import gloo, groups, watchdog
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.gloo import GlooGroup

TIMEOUT = 60.0
"""Seconds after which a collective raises whose peers should come: more than a busy machine sets ranks apart."""

SOON = 2.0
"""Seconds after which one raises whose peers do not come."""

BEAT = 0.1
"""Seconds between two looks of the watchdog, which else follow from the timeout."""


@contextmanager
def beating() -> Iterator[None]:
    """Watchdogs that begin in this block look every BEAT seconds, and so know soon who is silent."""
    with mock.patch.object(watchdog, "LONGEST_S", BEAT):
        yield


_numbers = itertools.count()  # meshes of equal axes count as one; all ranks make the same ones in the same order


def breakable(seconds: float = TIMEOUT, ranks: int | None = None) -> Any:
    """A mesh over all ranks, or the first few, that no other test uses; None elsewhere. Every rank calls this."""
    members = list(range(dist.get_world_size() if ranks is None else ranks))
    group = dist.new_group(members, timeout=timedelta(seconds=seconds), backend="gloo")
    name = f"mesh{next(_numbers)}"
    if dist.get_rank() not in members:
        return None
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    with beating():
        communicators(mesh)
    return mesh


def breakable_stages(stages: int, tensor: int = 1) -> Any:
    """The same with stages, over all ranks. tensor: ranks of that axis"""
    ranks = torch.arange(dist.get_world_size()).view(stages, -1, tensor)
    names = ("stage", "shard", "tensor")
    ranks, names = (ranks, names) if tensor > 1 else (ranks[..., 0], names[:2])
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)  # with communicators of its own
    # meshes of several axes have the timeout of the process group
    with mock.patch.object(groups, "timeout_of", lambda *_: timedelta(seconds=TIMEOUT)), beating():
        communicators(mesh)
    return mesh


@contextmanager
def giving_up(seconds: float) -> Iterator[None]:
    """Collectives that begin in this block raise after so many seconds without their peers, whatever their group's
    timeout, which cannot change any more."""

    def wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait(timedelta(seconds=seconds))

    def send(group: GlooGroup, tensor: Tensor, rank: int) -> None:
        wait([group.process_group.send([tensor], rank, gloo._tag(tensor))])

    def receive(group: GlooGroup, tensor: Tensor, rank: int) -> None:
        wait([group.process_group.recv([tensor], rank, gloo._tag(tensor))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_wait", wait)
        patch.setattr(GlooGroup, "send", send)
        patch.setattr(GlooGroup, "receive", receive)
        yield


@contextmanager
def by_the_backend() -> Iterator[None]:
    """Ranks communicate as those of NCCL do: by the collectives of the backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gathers", "reduce_scatters", "all_to_all"):
            patch.setattr(GlooGroup, name, getattr(RankGroup, name))
        yield


def exchanging(on: bool) -> AbstractContextManager[None]:
    """With `on`, ranks of gloo exchange messages of the library's own, as usual; else as those of NCCL."""
    return nullcontext() if on else by_the_backend()


def outcome(run: Callable[[], Any], seconds: float | None = None) -> str:
    """The last part of the traceback that `run` ends in, notes included; 'returned' where it does not raise. seconds:
    that ranks wait in it for those that do not come"""
    try:
        with giving_up(seconds) if seconds else nullcontext():
            run()
    except BaseException as error:
        return "".join(traceback.format_exception_only(error))
    return "returned"
