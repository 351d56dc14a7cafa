"""The plain compiled module, on the memory of a state of ours: two contenders with all they hold do not fit together.

    weights        views of the working copy, bf16, as parameters of the module
    gradients      bf16, fresh in every step, then copied into our fp32 gradient shards
    master, moments, optimizer     ours; torch's fused AdamW over whole flat tensors; then the working copy again

So both train the same weights, step by step in turn, and the plain module gets an optimizer that has no small tensors
to go round. On one rank alone: there a shard is the whole vector.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor, nn

from models import llama
from train.bench.cuda.module import Module
from train.bench.cuda.ours import Held
from train.bench.cuda.setting import ADAMW, LEARNING_RATE, Batch, Setting
from yafsdp_fn.optim.adamw import ScaleByAdamState


class Plain:
    """The module and its optimizer, over `held`'s memory as it is now: states that follow must use the same."""

    def __init__(self, config: llama.Config, held: Held, setting: Setting) -> None:
        memory = held.state.memory
        assert memory.comms.alone, "a shard must be the whole vector"
        self.held, self.memory, self.grads = held, memory, memory.kept_grads()
        self.module = Module(config, compiled=setting.compiles)
        self.params: list[nn.Parameter] = []
        self.slots: list[Tensor] = []  # where each gradient goes, in fp32
        units = self.module.units()
        assert len(units) == len(memory.units)
        for holder, unit in zip(units, _by_use(held.state.params), strict=True):
            views, slots = memory.working.leaves(unit), self.grads.leaves(unit)
            for (owner, name), view, slot in zip(holder.where, views, slots, strict=True):
                param = nn.Parameter(view.detach())
                owner.register_parameter(name, param)
                self.params.append(param)
                self.slots.append(slot.detach())
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        memory, state = self.memory, self.held.state
        (adam,) = (
            node
            for node in optree.tree_leaves(state.opt_state, is_leaf=lambda n: isinstance(n, ScaleByAdamState))
            if isinstance(node, ScaleByAdamState)
        )
        masters = [nn.Parameter(master.detach()) for master in memory.master.present]
        betas = (ADAMW["b1"], ADAMW["b2"])
        rest = {"eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
        optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=betas, fused=True, **rest)
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
