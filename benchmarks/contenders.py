"""The contenders behind one face: `step(batch) -> loss` does a whole training step and waits for the loss.

    Ours         a schedule of `yafsdp_fn`, or another way of it that a section of the benches names
    Module       FSDP2, DDP, or the plain module: `Llama` and `torch.optim.AdamW`

Everybody trains the same fp32 model from the same weights on the same batches with torch's fused AdamW.
Gradients are averaged over ranks and microbatches (each has as many targets, so a mean of means is the mean).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from unittest import mock

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import yafsdp_fn as ya
from benchmarks import names
from benchmarks.shapes import Shape
from models.llama import model as llama
from models.llama.config import Config
from train import schedule_names
from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.params.tree import named_leaves

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
        """The contender's own account of what it does and holds per step, where it has one."""


@dataclasses.dataclass
class Ours:
    """`yafsdp_fn`, with the reference loss and one schedule.

    features: switched off while it steps, for what is not built into its loss, optimizer or schedule
    ahead: whether a step leaves gathers for the next one under way
    """

    state: Any
    train_step: Any
    features: frozenset[str] = frozenset()
    ahead: bool = False

    def step(self, batch: Batch) -> float:
        with switched_off(self.features):
            self.state, metrics = self.train_step(self.state, batch)
            loss = float(metrics["loss"])
            if self.ahead:
                self.state.memory.comms.drain()  # in its own time, and under its own features
            return loss

    def program(self) -> dict[str, Any]:
        program = self.train_step.program(self.state)
        memory = self.state.memory
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
        """The context of all microbatches but the last. FSDP2 has sharded gradients only when it reduces every
        microbatch."""
        module = self.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def program(self) -> None:
        return None


@dataclasses.dataclass
class Part:
    """A contender that takes its part of a batch that ranks share: rows number `rank` of `ranks` equal parts."""

    of: Stepper
    rank: int
    ranks: int

    def step(self, batch: Batch) -> float:
        return self.of.step({key: leaf.chunk(self.ranks)[self.rank] for key, leaf in batch.items()})

    def program(self) -> None:
        return None


@contextlib.contextmanager
def switched_off(features: frozenset[str]) -> Iterator[None]:
    """Inside, features hold for the whole process, where contenders take turns: `nolinear`, `noexchange`."""
    with contextlib.ExitStack() as stack:
        if "nolinear" in features:
            stack.enter_context(mock.patch.multiple(ya, linear=F.linear, embedding=F.embedding))
        if "noexchange" in features:
            theirs = {name: getattr(RankGroup, name) for name in ("all_gathers", "reduce_scatters", "all_to_all")}
            stack.enter_context(mock.patch.multiple(GlooGroup, **theirs))
        yield


def all_reducing(name: str, ranks: int) -> int:
    """Ranks that the all-reduces of contender `name` run over (but those of scalars, which are over all)."""
    contender = names.read(name)
    return schedule_names.mesh(contender.base, ranks).get("replicate", ranks) if contender.ours else ranks


def compiled(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block` through torch.compile: one function for all layers, whose sizes do not change."""
    # blocks of all contenders share their code, and each way that one of them is called is one graph of it
    torch._dynamo.config.recompile_limit = 64
    out: Callable[..., Any] = torch.compile(block, dynamic=False)
    return out


def loss_of(contender: names.Contender, shape: Shape, chunks: int = 1) -> Callable[[Any, Batch], Any]:
    """The reference loss with the contender's features."""
    config = shape.llama()
    layer = compiled(llama.block(config)) if "compile" in contender.features else None
    return llama.loss(config, chunks=chunks, unroll=contender.unroll, layer=layer)


def adamw(*, fused: bool = True) -> Any:
    """Everybody's AdamW, as a transformation of ours. fused: by torch's kernel, else as it is defined"""
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    return tx if fused else tx._replace(rule=None)  # what nothing recognises is done as it is defined


def ours(
    schedule: str,
    shape: Shape,
    params: Any,
    tx: Any,
    *,
    seed: int,
    device: torch.device,
    loss: Any = None,
    **options: Any,
) -> Ours:
    """One of ours, on the mesh that its schedule needs. options: of `ya.train_step`, and `deterministic` of `ya.mesh`

    Shards layer by layer from the abstract tree: no rank ever holds the model, unless the schedule wants it to.
    """
    sizes = schedule_names.mesh(schedule, dist.get_world_size())
    mesh = ya.mesh(device=device.type, deterministic=options.pop("deterministic", None), **sizes)
    state = ya.init(params, tx, mesh=mesh, seed=seed)
    made = schedule_names.make(schedule, shape.layers)
    loss = loss or llama.loss(shape.llama())
    return Ours(state, ya.train_step(loss, tx, schedule=made, **{"skip_nonfinite": False, **options}))


def build_ours(name: str, shape: Shape, *, microbatches: int, seed: int, device: torch.device) -> Ours:
    """The schedule called `name`, with its features."""
    contender = names.read(name)
    parts, chunks = schedule_names.split(contender.base, microbatches)
    found = ours(
        contender.base,
        shape,
        llama.params(shape.llama()),
        adamw(fused="nofused" not in contender.features),
        seed=seed,
        device=device,
        loss=loss_of(contender, shape, chunks),
        microbatches=parts,
        deterministic=dist.get_world_size() * parts if "deterministic" in contender.features else None,
    )
    ahead = "update" in schedule_names.parse(contender.base)[1]
    return dataclasses.replace(found, features=contender.features & {"nolinear", "noexchange"}, ahead=ahead)


def shard_fsdp2(module: Llama, mesh: DeviceMesh, *, reshard: bool = True) -> Llama:
    """One group per block, and the root for the rest; its own defaults for prefetching.

    reshard: after forward; a stage of a pipeline keeps its weights until its last microbatch is over, as in torchtitan
    """
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=None if reshard else False)  # None: torch's default
    return module


def build(name: str, shape: Shape, *, microbatches: int, seed: int, device: torch.device) -> Stepper:
    """Builds one contender in an initialised process group."""
    contender = names.read(name)
    if contender.ours:
        return build_ours(name, shape, microbatches=microbatches, seed=seed, device=device)
    config = shape.llama()
    block = llama.block(config)
    block = compiled(block) if "compile" in contender.features else block
    module: nn.Module = (whole := Llama(config, materialize(config, seed=seed, device=device), block))
    if contender.base == "fsdp2":
        module = shard_fsdp2(whole, init_device_mesh(device.type, (dist.get_world_size(),)))
    elif contender.base == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return Module(module, peer_optimizer(module.parameters()), microbatches)


def peer_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
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


class Holder(nn.Module):
    """Holds one unit's parameters under their dotted names and calls `function(weights, *args)`.

    `FSDP2` swaps the entries of `_parameters` around each forward, so the weights are read anew on every call.
    """

    def __init__(self, weights: Any, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.spec = optree.tree_structure(weights)
        self.where: list[tuple[nn.Module, str]] = []
        for name, leaf in named_leaves(weights):
            owner: nn.Module = self
            *parents, attribute = name.split(".")
            for part in parents:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(attribute, nn.Parameter(leaf.detach().clone()))
            self.where.append((owner, attribute))

    def forward(self, *args: Any) -> Any:
        weights = optree.tree_unflatten(self.spec, [getattr(owner, attribute) for owner, attribute in self.where])
        return self.function(weights, *args)


class Llama(nn.Module):
    """`models.llama` as a module, or its visits `first` to `end` of `embed, layers, head`: its own functions over
    parameters held by modules, so the maths are the same to the last operation and a ratio compares the sharding alone.

    Llama
      embed     Holder      the tree params.embed
      layers    [Holder]    one per layer: params.layers without its layer axis
      head      Holder      the tree params.head; of a tied config the norm alone: the matrix is handed to it

    forward: tokens [B, S], or [B, S, E] of the visits before, and targets [B, S] -> the mean loss, or [B, S, E]
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        block: Callable[..., Any] | None = None,
        *,
        first: int = 0,
        end: int | None = None,
        recompute: int = 0,
    ) -> None:
        """Builds the modules of visits `first` to `end`.

        params: a plain tree, as `ya.materialize` gives it, of which its part is copied; block: in place of
        `llama.block`; recompute: so many layers, the first ones, run their forward again in backward
        """
        super().__init__()
        layer = block or llama.block(config)
        last = config.layers + 1
        end = last + 1 if end is None else end
        self.tied = config.tied
        self.rotary = functools.partial(llama.rotary, config)
        self.embed = Holder(params.embed, llama.embed) if first == 0 else None
        self.layers = nn.ModuleList(
            Holder(
                optree.tree_map(lambda stack, l=l: stack[l], params.layers),
                functools.partial(_layer, layer, l < recompute),
            )
            for l in range(max(first, 1) - 1, min(end, last) - 1)
        )
        head = llama.head_loss(config)
        self.head = Holder(params.head, _tied(head) if config.tied else head) if end > last else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        rope = self.rotary(torch.arange(x.shape[1], device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        if self.head is None:
            return x
        mean = self.head(x, targets, *([self.embed.weight] if self.tied and self.embed is not None else []))
        loss: Tensor = mean.total / mean.weight
        return loss

    def units(self) -> list[Holder]:
        """The units in the order of their first use."""
        return [unit for unit in (self.embed, *self.layers, self.head) if isinstance(unit, Holder)]


def _layer(block: Callable[..., Any], recompute: bool, w: Any, x: Tensor, rope: Any) -> Tensor:
    out: Tensor = checkpoint(block, x, w, rope, use_reentrant=False)[0] if recompute else block(x, w, rope)[0]
    return out


def _tied(last: Callable[..., ya.Mean]) -> Callable[..., ya.Mean]:
    return lambda w, x, targets, matrix: last((w, {"weight": matrix}), x, targets)


def materialize(config: Config, *, seed: int, device: torch.device) -> Any:
    """The full starting weights, the same bits that `yafsdp_fn.init` shards."""
    return ya.materialize(llama.params(config), seed=seed, device=device)
