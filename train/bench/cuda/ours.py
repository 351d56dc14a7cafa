"""`yafsdp_fn` as contenders: one state, and a step function per schedule, which take turns on it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models import llama
from train.bench.cuda import blocks
from train.bench.cuda.setting import ADAMW, LEARNING_RATE, Batch, Setting
from yafsdp_fn.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class How:
    """What is switched on. compiled: None, as the setting has it; linear: weight gradients are written into their slots
    where dtypes allow it and blocks are not compiled; unroll: layers gathered, visited and reduced as one
    """

    compiled: bool | None = None
    reduce: torch.dtype = torch.float32
    graphs: bool = False
    unroll: int = 1
    fused: bool = True
    linear: bool = True


class Held:
    """The state that the steps take and leave."""

    def __init__(self, state: ya.ShardedState) -> None:
        self.state = state


class Ours:
    """One schedule on a state that others may share."""

    def __init__(self, held: Held, train_step: Any, *, linear: bool = True) -> None:
        self.held, self.train_step = held, train_step
        self._linear = linear

    def turn(self) -> None: ...

    def step(self, batch: Batch) -> Tensor:
        with contextlib.nullcontext() if self._linear else mock.patch.object(ya, "linear", F.linear):
            self.held.state, metrics = self.train_step(self.held.state, batch)
        loss: Tensor = metrics["loss"]
        return loss


def build(
    config: llama.Config,
    mesh: DeviceMesh,
    setting: Setting,
    schedules: Mapping[str, Schedule],
    how: How = How(),
) -> dict[str, Ours]:
    """A contender per schedule, on one new state."""
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    tx = tx if how.fused else tx._replace(rule=None)
    held = Held(ya.init(llama.params(config), tx, mesh=mesh, precision=setting.precision(how.reduce)))
    loss = blocks.loss(config, setting.compiles if how.compiled is None else how.compiled, how.unroll)
    return {
        name: Ours(
            held, ya.train_step(loss, tx, schedule=schedule, skip_nonfinite=False, graphs=how.graphs), linear=how.linear
        )
        for name, schedule in schedules.items()
    }
