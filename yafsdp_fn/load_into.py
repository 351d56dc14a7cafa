"""load_into: weights back into the module that `functionalize` has read, gathered a layer at a time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from yafsdp_fn.low_rank import is_low_rank
from yafsdp_fn.map_layers import map_layers
from yafsdp_fn.params.markers import strip
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree, join
from yafsdp_fn.sharding import unshard


@torch.no_grad()
def load_into(module: nn.Module, params: Mapping[str, Tree]) -> None:
    """Writes `params` into the parameters of `module`, in their dtypes; adapters (`ya.lora`) are added to weights.

    module: the one that `functionalize` has read, or another of the same class and config
    params: of a state (every rank must call, and each writes into its own module), or plain tensors

    Nothing but a layer, or a module beside the layers, is whole at a time. Raises TypeError or ValueError, naming the
    parameter, where one is missing, of another shape, or without memory: before anything is gathered where names tell.
    """
    target = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules())
    if not isinstance(params, Mapping):
        raise TypeError(
            f"load_into: expected the params of ya.functionalize, got {type(params).__name__}; a state has .params"
        )
    if meta := next((name for name, param in target.items() if param.is_meta), None):
        raise ValueError(f"load_into: {meta} is on the meta device, where values are lost; module.to_empty(device=...)")
    if odd := next((name for name in params if name not in modules and name not in target), None):
        raise ValueError(f"load_into: the module has no {odd}; give the one that these params come from")
    left = {id(param): name for name, param in target.items()}

    def write(prefix: str, weights: Tree) -> None:
        leaves: Mapping[str, Any] = weights if isinstance(weights, Mapping) else {"": weights}
        for key, leaf in leaves.items():
            name, whole = join(prefix, key), leaf.merged() if is_low_rank(leaf) else leaf
            if name not in target or target[name].shape != whole.shape:
                there = (
                    f"there of shape {tuple(target[name].shape)}" if name in target else "no parameter of the module"
                )
                raise ValueError(f"load_into: {name}, of shape {tuple(whole.shape)}, is {there}")
            target[name].copy_(whole)
            left.pop(id(target[name]), None)

    for name, unit in params.items():
        if not _is_stack(name, unit, target):
            write(name, strip(unshard(unit)))
            continue
        keys = iter(key for key, _ in modules[name].named_children())
        map_layers(lambda weights: write(join(name, next(keys, "beyond its layers")), weights), unit)  # noqa: B023
    if left:
        raise ValueError(f"load_into: these params have no {next(iter(left.values()))}; give all of a state's params")


def _is_stack(name: str, unit: Tree, target: Mapping[str, Tensor]) -> bool:
    if isinstance(unit, Sharded):
        return unit.entry.length is not None
    whole = strip(unit)
    return name not in target and all(join(name, key) not in target for key in whole)
