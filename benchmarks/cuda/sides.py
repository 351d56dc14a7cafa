"""The contenders of the sections, by side. All call `models.llama`'s block, compiled once for everybody or not at all.

    build          `yafsdp_fn`: one state, and a step function per schedule, which take turns on it
    Plain          the plain compiled module, on the memory of a state of ours: two contenders with all they hold do not
                   fit together. Weights are views of the working copy, bf16; gradients are fresh in every step, then
                   copied into our fp32 gradient shards; master and moments are ours, under torch's fused AdamW over
                   whole flat tensors. So both train the same weights, and the plain module gets an optimizer without
                   small tensors to go round. On one rank alone: there a shard is the whole vector
    build_fsdp2    fsdp2             gathers of the next unit are issued ahead, explicitly: prefetch lists of one
                   fsdp2-prefetch2   of the next two
                   fsdp2-separate    the same, reductions in a process group of their own, and two buffers for them
                   Every unit's own group of parameters: the blocks; the rest is the root's, gathered to the end of the
                   step. Those that differ in prefetching alone take turns on one module

Shapes are static: a second sequence length compiles again, where torch would otherwise go over to symbolic sizes, whose
kernels are slower. Embedding and head run as they are, for everybody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import yafsdp_fn as ya
from benchmarks import contenders
from benchmarks.contenders import Batch, Holder, Llama, adamw, peer_optimizer
from benchmarks.cuda.gpu import PRECISION, Setting
from models import llama
from yafsdp_fn.schedules import Schedule


class Held:
    """The state that the steps take and leave."""

    def __init__(self, state: ya.ShardedState) -> None:
        self.state = state


class Ours:
    """One schedule on a state that others may share."""

    def __init__(self, held: Held, train_step: Any) -> None:
        self.held, self.train_step = held, train_step

    def turn(self) -> None: ...

    def step(self, batch: Batch) -> Tensor:
        self.held.state, metrics = self.train_step(self.held.state, batch)
        loss: Tensor = metrics["loss"]
        return loss


def build(
    config: llama.Config,
    mesh: DeviceMesh,
    setting: Setting,
    schedules: Mapping[str, Schedule],
) -> dict[str, Ours]:
    """A contender per schedule, on one new state."""
    tx = adamw()
    held = Held(ya.init(llama.params(config), tx, mesh=mesh, precision=PRECISION))
    loss = llama.loss(config, layer=block(config, setting.compiles))
    make = functools.partial(ya.train_step, loss, tx, skip_nonfinite=False)
    return {name: Ours(held, make(schedule=schedule)) for name, schedule in schedules.items()}


STD = 0.02


def module(config: llama.Config, *, compiled: bool, recompute: int = 0) -> Llama:
    """The module of the peers. Parameters are on the meta device until `fill`. recompute: so many layers, the first
    ones, run their forward again in backward"""
    params: Any = llama.params(config)
    tree = ya.params.without_markers(optree.tree_map(lambda p: torch.empty(p.shape, device="meta"), params))
    return Llama(config, tree, block(config, compiled), recompute=recompute)


def ends(made: Llama) -> list[Holder]:
    """Embedding and head."""
    units = made.units()
    return [units[0], units[-1]]


def fill(module: nn.Module, device: str) -> None:
    """Gives the parameters of `module` memory on `device`: matrices normal, gains one. Zeros would run cooler."""
    module.to_empty(device=device)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.normal_(std=STD)


@functools.cache
def block(config: llama.Config, compiled: bool) -> Callable[..., tuple[Tensor, None]]:
    """`llama.block`; the same object for every caller, so that nobody compiles what another has."""
    found: Callable[..., Any] = llama.block(config)
    return contenders.compiled(found) if compiled else found


class Plain:
    """The module and its optimizer, over `held`'s memory as it is now: states that follow must use the same."""

    def __init__(self, config: llama.Config, held: Held, setting: Setting) -> None:
        memory = held.state.memory
        assert memory.comms.alone, "a shard must be the whole vector"
        self.held = held
        self.memory = memory
        self.grads = memory.kept_grads()
        self.module = module(config, compiled=setting.compiles)
        self.params: list[nn.Parameter] = []
        self.slots: list[Tensor] = []  # where each gradient goes, in fp32
        units = self.module.units()
        assert len(units) == len(memory.units)
        for holder, unit in zip(units, _by_use(held.state.params), strict=True):
            views = memory.working.views(unit).leaves
            slots = self.grads.views(unit).leaves
            for (owner, name), view, slot in zip(holder.where, views, slots, strict=True):
                param = nn.Parameter(view.detach())
                owner.register_parameter(name, param)
                self.params.append(param)
                self.slots.append(slot.detach())
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        memory = self.memory
        state = self.held.state
        (adam,) = (
            node
            for node in optree.tree_leaves(state.opt_state, is_leaf=lambda n: isinstance(n, ya.optim.ScaleByAdamState))
            if isinstance(node, ya.optim.ScaleByAdamState)
        )
        masters = [nn.Parameter(master.detach()) for master in memory.master.present]
        optimizer = peer_optimizer(masters)
        moments = zip(masters, _tensors(adam.mu), _tensors(adam.nu), self.grads.present, strict=True)
        for master, mean, square, grad in moments:
            assert master.shape == mean.shape == square.shape == grad.shape
            count = torch.tensor(float(state.step), device=master.device)
            optimizer.state[master] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}
            master.grad = grad
        return optimizer

    def turn(self) -> None:
        for parameter, mine in zip(self.optimizer.param_groups[0]["params"], self.memory.masters(), strict=True):
            assert parameter.data_ptr() == mine.data_ptr(), "the state has moved"

    @torch.no_grad()
    def step(self, batch: Batch) -> Tensor:
        with torch.enable_grad():
            loss: Tensor = self.module(batch["tokens"], batch["targets"])
            grads = torch.autograd.grad(loss, self.params)
        torch._foreach_copy_(self.slots, grads)
        self.norm = torch.stack(torch._foreach_norm(self.grads.present)).square().sum().sqrt()  # as ours reports
        self.optimizer.step()
        torch._foreach_copy_(self.memory.working.present, self.memory.master.present)
        return loss.detach()


def _by_use(params: Any) -> list[int]:
    """Units of embedding, layers and head: those of the module's parts."""
    return [
        unit
        for part in (params.embed, params.layers, params.head)
        for _, group, _ in part.group_leaves()
        for unit in group.units
    ]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


SEPARATE = ("set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers")
"""Methods of FSDPModule, from torch 2.13 on."""


class Fsdp2(NamedTuple):
    """A setting of FSDP2. prefetch: units ahead; separate: a group of their own and two buffers for reductions"""

    prefetch: int
    separate: bool


def settings() -> dict[str, Fsdp2]:
    """The settings that this torch has."""
    found = {"fsdp2": Fsdp2(1, False), "fsdp2-prefetch2": Fsdp2(2, False)}
    if all(hasattr(FSDPModule, name) for name in SEPARATE):
        found["fsdp2-separate"] = Fsdp2(2, True)
    return found


def local(tensor: Any) -> Tensor:
    """The shard of a DTensor, or what it is."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class Sharded:
    """A module that FSDP2 has sharded, with its optimizer; reports the gradient's norm as ours does."""

    def __init__(self, module: nn.Module, how: Fsdp2, shared: Sharded | None = None) -> None:
        self.module, self.how = module, how
        self.optimizer: torch.optim.AdamW = peer_optimizer(module.parameters()) if shared is None else shared.optimizer
        self.norm: Tensor | None = None

    def turn(self) -> None:
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


def build_fsdp2(
    config: llama.Config, mesh: DeviceMesh, setting: Setting, *, recompute: int, separate: bool = True
) -> dict[str, Sharded]:
    """A contender per setting. separate: also those with a group of their own, which are a second module"""
    out: dict[str, Sharded] = {}
    first: dict[bool, Sharded] = {}
    for name, how in settings().items():
        if how.separate and not separate:
            continue
        shared = first.get(how.separate)
        made = sharded(config, mesh, setting, recompute, how.separate) if shared is None else shared.module
        out[name] = Sharded(made, how, shared)
        first.setdefault(how.separate, out[name])
    return out


def sharded(config: llama.Config, mesh: DeviceMesh, setting: Setting, recompute: int, separate: bool) -> Llama:
    """A module of random weights. separate: see `Fsdp2`; torch reads it in the first step alone, and makes a group each
    time it is set, so that it is set here, once."""
    made = module(config, compiled=setting.compiles, recompute=recompute)
    policy = MixedPrecisionPolicy(param_dtype=PRECISION.compute, reduce_dtype=PRECISION.reduce)
    for layer in made.layers:
        fill(layer, setting.device)  # one after the other: nobody holds the whole model
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for end in ends(made):
        fill(end, setting.device)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    if separate:
        root: Any = made
        root.set_separate_reduce_scatter_group(True)
        root.set_reduce_scatter_max_input_buffers(2)
    return made
