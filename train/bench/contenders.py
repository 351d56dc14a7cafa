"""The contenders behind one face: `step(batch) -> loss` does a whole training step and waits for the loss.

Everybody trains the same fp32 model from the same weights on the same batches with torch's fused AdamW.
Gradients are averaged over ranks and microbatches (each has as many targets, so a mean of means is the mean).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from unittest import mock

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import yafsdp_fn as ya
from models.llama import model as llama
from train.bench import names, schedules
from train.bench.options import Shape
from train.bench.peer_model import Llama, materialize
from yafsdp_fn.comm.collectives import Group
from yafsdp_fn.comm.exchange import GlooGroup

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
        """What the contender says it does and holds per step, where it can say."""


@dataclasses.dataclass
class Ours:
    """`yafsdp_fn`, with the reference loss and one schedule.

    levers: switched off while it steps, for what is not built into its loss, optimizer or schedule
    ahead: whether a step leaves gathers for the next one under way
    """

    state: Any
    train_step: Any
    levers: frozenset[str] = frozenset()
    ahead: bool = False

    def step(self, batch: Batch) -> float:
        with switched_off(self.levers):
            self.state, metrics = self.train_step(self.state, batch)
            loss = float(metrics["loss"])
            if self.ahead:
                self.state.memory.comms.drain()  # in its own time, and under its own levers
            return loss

    def program(self) -> dict[str, Any]:
        program, memory = self.train_step.program(self.state), self.state.memory
        params, moments = (
            sum(leaf.nbytes for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor))
            for tree in (self.state.params, self.state.opt_state)
        )
        slots = sum(program.secondary_bytes().values())
        slots += 0 if memory.weights_alias else sum(program.slot_bytes().values())
        slots += 0 if memory.grads_alias else sum(program.grad_slot_bytes().values())
        return {
            "ops": dict(Counter(type(op).__name__ for op in program.ops)),
            "wire_bytes": dict(program.wire_bytes()),
            "shard_bytes": 2 * params + moments,  # gradient shards are like those of the parameters
            "slot_bytes": slots,
        }


@dataclasses.dataclass
class Module:
    """A peer: an nn.Module, wrapped or not, and `torch.optim.AdamW(fused=True)`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    microbatches: int = 1

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        parts = zip(*(batch[key].chunk(self.microbatches) for key in ("tokens", "targets")), strict=True)
        losses: list[Tensor] = []
        for tokens, targets in parts:
            with self.unsynchronized() if len(losses) + 1 < self.microbatches else contextlib.nullcontext():
                loss: Tensor = self.module(tokens, targets) / self.microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.optimizer.step()
        return sum(loss.item() for loss in losses)

    def unsynchronized(self) -> contextlib.AbstractContextManager[None]:
        """For all microbatches but the last. FSDP2 has sharded gradients only when it reduces every microbatch."""
        module = self.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def program(self) -> None:
        return None


@contextlib.contextmanager
def switched_off(levers: frozenset[str]) -> Iterator[None]:
    """Inside, `nolinear` and `noexchange` hold for the whole process, where contenders take turns."""
    with contextlib.ExitStack() as stack:
        if "nolinear" in levers:
            stack.enter_context(mock.patch.multiple(ya, linear=F.linear, embedding=F.embedding))
        if "noexchange" in levers:
            theirs = {name: getattr(Group, name) for name in ("all_gathers", "reduce_scatters", "all_to_all")}
            stack.enter_context(mock.patch.multiple(GlooGroup, **theirs))
        yield


def all_reducing(name: str, ranks: int) -> int:
    """Ranks that the all-reduces of contender `name` run over (but those of scalars, which are over all)."""
    contender = names.read(name)
    return schedules.mesh(contender.base, ranks).get("replicate", ranks) if contender.ours else ranks


def compiled(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block` through torch.compile: one function for all layers, whose sizes do not change."""
    # blocks of all contenders share their code, and each way that one of them is called is one graph of it
    torch._dynamo.config.recompile_limit = 64
    out: Callable[..., Any] = torch.compile(block, dynamic=False)
    return out


def loss_of(contender: names.Contender, shape: Shape, chunks: int = 1) -> Callable[[Any, Batch], Any]:
    """The reference loss with the contender's levers."""
    config = shape.llama()
    layer = compiled(llama.block(config)) if "compile" in contender.levers else None
    return llama.loss(config, chunks=chunks, unroll=contender.unroll, layer=layer)


def optimizer(contender: names.Contender) -> Any:
    """Everybody's AdamW, as a transformation of ours."""
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    # what nothing recognises is done as it is defined
    return tx._replace(rule=None) if "nofused" in contender.levers else tx


def build_ours(name: str, shape: Shape, *, microbatches: int, seed: int, device: torch.device) -> Ours:
    """Shards layer by layer from the abstract tree: no rank ever holds the model, unless the schedule wants it to."""
    contender = names.read(name)
    tx = optimizer(contender)
    parts, chunks = schedules.split(contender.base, microbatches)
    ranks = torch.distributed.get_world_size()
    micro_shards = ranks * parts if "deterministic" in contender.levers else None
    mesh = ya.mesh(device=device.type, deterministic=micro_shards, **schedules.mesh(contender.base, ranks))
    state = ya.init(llama.params(shape.llama()), tx, mesh=mesh, seed=seed)
    schedule = schedules.make(contender.base, shape.layers)
    loss = loss_of(contender, shape, chunks)
    step = ya.train_step(loss, tx, schedule=schedule, microbatches=parts, skip_nonfinite=False)
    ahead = "update" in schedules.parse(contender.base)[1]
    return Ours(state, step, contender.levers & {"nolinear", "noexchange"}, ahead)


def shard_fsdp2(module: Llama, device: torch.device) -> nn.Module:
    """One group per block, resharded after forward, and the root for the rest; its own defaults for prefetching."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh)
    return module


def build(name: str, shape: Shape, *, microbatches: int, seed: int, device: torch.device) -> Stepper:
    """Builds one contender in an initialised process group."""
    contender = names.read(name)
    if contender.ours:
        return build_ours(name, shape, microbatches=microbatches, seed=seed, device=device)
    config = shape.llama()
    block = llama.block(config)
    block = compiled(block) if "compile" in contender.levers else block
    module: nn.Module = Llama(config, materialize(config, seed=seed, device=device), block)
    if contender.base == "fsdp2":
        assert isinstance(module, Llama)
        module = shard_fsdp2(module, device)
    elif contender.base == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return Module(module, peer_optimizer(module.parameters()), microbatches)


def peer_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Everybody's AdamW, as torch has it."""
    return torch.optim.AdamW(
        parameters,
        lr=LEARNING_RATE,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        fused=True,
    )


def make_batches(shape: Shape, count: int, *, seed: int, rank: int, device: torch.device) -> list[Batch]:
    """`count` batches of random tokens for this rank, the same for every contender."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    batches = []
    for _ in range(count):
        tokens = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator).to(device)
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return batches
