"""The contenders behind one face: `step(batch) -> loss` does a whole training step and waits for the loss.

Everybody trains the same fp32 model from the same weights on the same batches with torch's fused AdamW.
Gradients are averaged over ranks (every batch has as many targets, so a mean of means is the mean).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench.options import Contender, Shape
from train.bench.peer_model import Llama, materialize
from yafsdp_fn.schedules import Gather, Reduce

ADAMW: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE = 1e-4
"""Small: Adam's first updates are of this size whatever the gradient, so rounding grows with it."""

Batch = dict[str, Tensor]
"""tokens and targets, [B, S] each, of this rank."""


class Stepper(Protocol):
    """One contender."""

    def step(self, batch: Batch) -> float:
        """One training step; returns this rank's mean loss, or the global one where the step makes it anyway."""

    def program(self) -> dict[str, Any] | None:
        """What the contender says it does per step, where it can say."""


@dataclasses.dataclass
class Ours:
    """`yafsdp_fn`, with the reference loss and the default ZeRO-3 schedule."""

    state: Any
    train_step: Any

    def step(self, batch: Batch) -> float:
        self.state, metrics = self.train_step(self.state, batch)
        return float(metrics["loss"])

    def program(self) -> dict[str, Any]:
        program = self.train_step.program(self.state)
        units = program.trace.units
        ops: dict[str, int] = {}
        for op in program.ops:
            ops[type(op).__name__] = ops.get(type(op).__name__, 0) + 1
        return {
            "ops": ops,
            "gather_bytes": sum(
                units[u].gather_bytes for op in program.ops if isinstance(op, Gather) for u in op.units
            ),
            "reduce_bytes": sum(
                units[u].reduce_bytes for op in program.ops if isinstance(op, Reduce) for u in op.units
            ),
        }


@dataclasses.dataclass
class Module:
    """A peer: an nn.Module, wrapped or not, and `torch.optim.AdamW(fused=True)`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.module(batch["tokens"], batch["targets"])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def program(self) -> None:
        return None


def build_ours(shape: Shape, *, seed: int, device: torch.device) -> Ours:
    """Shards layer by layer from the abstract tree: no rank ever holds the model."""
    config = shape.llama()
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    state = ya.init(llama.params(config), tx, mesh=ya.mesh(device=device.type), seed=seed)
    step = ya.train_step(llama.loss(config), tx, schedule=ya.schedules.zero3(), skip_nonfinite=False)
    return Ours(state, step)


def shard_fsdp2(module: Llama, device: torch.device) -> nn.Module:
    """One group per block, resharded after forward, and the root for the rest; its own defaults for prefetching."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh)
    return module


def build(name: Contender, shape: Shape, *, seed: int, device: torch.device) -> Stepper:
    """Builds one contender in an initialised process group."""
    if name == "ours":
        return build_ours(shape, seed=seed, device=device)
    config = shape.llama()
    module: nn.Module = Llama(config, materialize(config, seed=seed, device=device))
    if name == "fsdp2":
        assert isinstance(module, Llama)
        module = shard_fsdp2(module, device)
    elif name == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=LEARNING_RATE,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        fused=True,
    )
    return Module(module, optimizer)


def make_batches(shape: Shape, count: int, *, seed: int, rank: int, device: torch.device) -> list[Batch]:
    """`count` batches of random tokens for this rank, the same for every contender."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    batches = []
    for _ in range(count):
        tokens = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator).to(device)
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return batches
