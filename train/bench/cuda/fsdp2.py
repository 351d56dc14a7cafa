"""FSDP2 as contenders, by their settings. Those that differ in prefetching alone take turns on one module.

    fsdp2                gathers of the next unit are issued ahead, explicitly: prefetch lists of one
    fsdp2-prefetch2      of the next two
    fsdp2-separate       the same, reductions in a process group of their own, and two buffers for them, where torch
                         has that

Every unit's own group of parameters: the blocks; the rest is the root's, gathered to the end of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models import llama
from train.bench.cuda.module import Module, fill
from train.bench.cuda.setting import ADAMW, LEARNING_RATE, Batch, Setting

SEPARATE = ("set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers")
"""Of FSDPModule, from torch 2.13 on."""


class How(NamedTuple):
    """prefetch: units ahead; separate: a group of their own and two buffers for reductions"""

    prefetch: int
    separate: bool


def settings() -> dict[str, How]:
    """Those that this torch has."""
    found = {"fsdp2": How(1, False), "fsdp2-prefetch2": How(2, False)}
    if all(hasattr(FSDPModule, name) for name in SEPARATE):
        found["fsdp2-separate"] = How(2, True)
    return found


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """The optimizer of the peers."""
    betas = (ADAMW["b1"], ADAMW["b2"])
    rest = {"eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=betas, fused=True, **rest)


def local(tensor: Any) -> Tensor:
    """The shard of a DTensor, or what it is."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class Sharded:
    """A module that a peer has sharded, with its optimizer; reports the gradient's norm as ours does."""

    def __init__(self, module: nn.Module, how: How | None = None, shared: Sharded | None = None) -> None:
        self.module, self.how = module, how
        self.optimizer: torch.optim.AdamW = adamw(module) if shared is None else shared.optimizer
        self.norm: Tensor | None = None

    def turn(self) -> None:
        if self.how is not None:
            prefetching(self.module, self.how.prefetch)

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.module(batch["tokens"], batch["targets"])
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [local(param.grad) for param in self.module.parameters() if param.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(squares)
        self.norm = squares.sqrt()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def prefetching(module: nn.Module, units: int) -> None:
    """Sets the lists of what each layer of a module of `sharded` gathers ahead; at any time."""
    layers: Any = list(module.layers)  # type: ignore[arg-type]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + units])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - units) : index][::-1])


def build(
    config: llama.Config, mesh: DeviceMesh, setting: Setting, *, recompute: int, separate: bool = True
) -> dict[str, Sharded]:
    """A contender per setting. separate: also those with a group of their own, which are a second module"""
    out: dict[str, Sharded] = {}
    first: dict[bool, Sharded] = {}
    for name, how in settings().items():
        if how.separate and not separate:
            continue
        shared = first.get(how.separate)
        module = sharded(config, mesh, setting, recompute, how.separate) if shared is None else shared.module
        out[name] = Sharded(module, how, shared)
        first.setdefault(how.separate, out[name])
    return out


def sharded(config: llama.Config, mesh: DeviceMesh, setting: Setting, recompute: int, separate: bool) -> nn.Module:
    """A module of random weights. separate: see `How`; torch reads it in the first step alone, and makes a group each
    time it is set, so that it is set here, once."""
    module = Module(config, compiled=False, recompute=recompute)
    policy = MixedPrecisionPolicy(param_dtype=setting.compute, reduce_dtype=torch.float32)
    for layer in module.layers:
        fill(layer, setting.device)  # one after the other: nobody holds the whole model
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for rest in (module.embed, module.head):
        fill(rest, setting.device)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    if separate:
        root: Any = module
        root.set_separate_reduce_scatter_group(True)
        root.set_reduce_scatter_max_input_buffers(2)
    return module
