"""`yafsdp_fn` as contenders: one state, and a step function per schedule, which take turns on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
    """What is switched on.

    compiled: None, as the setting has it; linear: weight gradients are written into their slots, where dtypes allow it
    and blocks are not compiled; unroll: layers gathered, visited and reduced as one; one_pass: where there is a kernel
    for it, the optimizer's also writes the working copy
    """

    compiled: bool | None = None
    reduce: torch.dtype = torch.float32
    graphs: bool = False
    unroll: int = 1
    fused: bool = True
    linear: bool = True
    one_pass: bool = True

    def patches(self) -> contextlib.ExitStack:
        """Holds during a step what is switched off for the whole process, in which contenders take turns."""
        stack = contextlib.ExitStack()
        if not self.linear:
            stack.enter_context(mock.patch.object(ya, "linear", F.linear))
        if not self.one_pass:
            stack.enter_context(mock.patch("yafsdp_fn.optim.step.copying.copying_kernel", lambda device: None))
        return stack


class Held:
    """The state that the steps take and leave."""

    def __init__(self, state: ya.ShardedState) -> None:
        self.state = state


class Ours:
    """One schedule on a state that others may share."""

    def __init__(self, held: Held, train_step: Any, how: How) -> None:
        self.held, self.train_step, self.how = held, train_step, how

    def turn(self) -> None: ...

    def step(self, batch: Batch) -> Tensor:
        with self.how.patches():
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
    layer = blocks.block(config, setting.compiles if how.compiled is None else how.compiled)
    loss = llama.loss(config, unroll=how.unroll, layer=layer)
    make = functools.partial(ya.train_step, loss, tx, skip_nonfinite=False, graphs=how.graphs)
    return {name: Ours(held, make(schedule=schedule), how) for name, schedule in schedules.items()}
