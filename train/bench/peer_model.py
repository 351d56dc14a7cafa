"""The nn.Module the peers train: `models.llama`'s own functions over parameters held by modules, so the maths are the
same to the last operation and a ratio compares the sharding alone.

    Llama
      embed     Holder      the tree params.embed
      layers    [Holder]    one per layer: params.layers without its layer axis
      head      Holder      the tree params.head
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from models.llama import model as llama
from models.llama.config import Config
from yafsdp_fn.params.tree import named_leaves


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
    """`models.llama` as a module; `forward(tokens [B, S], targets [B, S])` is this rank's mean loss."""

    def __init__(self, config: Config, params: Any, block: Callable[..., Any] | None = None) -> None:
        """params: a plain tree, as `yafsdp_fn.materialize` gives it; copied. block: in place of `llama.block`."""
        super().__init__()
        layer = llama.block(config) if block is None else block
        self.rotary = functools.partial(llama.rotary, config)
        count = optree.tree_leaves(params.layers)[0].shape[0]
        self.embed = Holder(params.embed, llama.embed)
        self.layers = nn.ModuleList(
            Holder(optree.tree_map(lambda stack, l=l: stack[l], params.layers), lambda w, x, rope: layer(x, w, rope)[0])
            for l in range(count)
        )
        self.head = Holder(params.head, llama.head_loss(config))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        rope = self.rotary(torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        mean = self.head(x, targets)
        loss: Tensor = mean.total / mean.weight
        return loss


def materialize(config: Config, *, seed: int, device: torch.device) -> Any:
    """The full starting weights, the same bits that `yafsdp_fn.init` shards."""
    return ya.materialize(llama.params(config), seed=seed, device=device)
