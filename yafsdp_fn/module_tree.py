"""The parameters of a module as a tree of units, with its layers as a stack, or the reason why not.

module.model.embed_tokens.weight         ->  {"model.embed_tokens": {"weight": Lazy [V, E]},
module.model.layers[i].mlp.up.weight     ->   "model.layers": Stacked({"mlp.up.weight": Lazy [L, F, E]}),
module.scale                             ->   "scale": Lazy}
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from yafsdp_fn.params.markers import Stacked, Unit, frozen
from yafsdp_fn.params.sources import Lazy
from yafsdp_fn.params.tree import join
from yafsdp_fn.skeleton import hooked

Place = tuple[str, str]
"""The unit that holds a parameter, and the leaf in it, "" where the unit is one."""


@dataclasses.dataclass(frozen=True)
class ModuleTree:
    """Where each parameter of a module is in its tree.

    layers: dotted name of the layers; keys: of each among them; layer: places by the parameter's name in a layer
    beside: of each module that is visited beside the layers, places by the parameter's name in it
    own: of the parameters that modules around the layers have themselves, by their dotted names; a leaf "" is a unit
    """

    params: dict[str, Any]
    layers: str
    keys: tuple[str, ...]
    layer: Mapping[str, Place]
    beside: Mapping[str, Mapping[str, Place]]
    own: Mapping[str, Place]

    @property
    def units(self) -> frozenset[str]:
        return frozenset(self.params)

    def described(self) -> "ModuleTree":
        """This without the leaves, which hold on to the module."""
        return dataclasses.replace(self, params=dict.fromkeys(self.params))


def tree_of(module: nn.Module, layers: str) -> ModuleTree:
    """Reads `module`. Raises as `functionalize` does."""
    container = _container(module, layers)
    _refuse(module)
    keys, parts = zip(*container.named_children(), strict=True)
    stacked, layer = _stack(layers, keys, parts)
    inside = {id(p): f"{layers}.{key}.{name}" for key, part in zip(keys, parts, strict=True) for name, p in _all(part)}
    params: dict[str, Any] = {layers: stacked}
    own: dict[str, Place] = {}
    beside: dict[str, dict[str, Place]] = {}
    seen: dict[int, Place] = {}
    for name, part in _beside(module, layers):
        parameters = {"": part} if isinstance(part, Tensor) else dict(_all(part))
        new: dict[str, Tensor] = {}
        for key, param in parameters.items():
            if id(param) in inside:
                pair = f"{inside[id(param)]} and {join(name, key)} are one parameter"
                raise ValueError(f"functionalize: {pair}, which a stack of layers would untie; give each its own")
            if id(param) not in seen:
                seen[id(param)], new[key] = (name, key), param
        places = {key: seen[id(param)] for key, param in parameters.items()}
        if isinstance(part, Tensor):
            own[name] = places[""]
            params |= {name: _leaf(part)} if new else {}
        else:
            beside[name] = places
            params |= {name: _unit(new)} if new else {}
    return ModuleTree(params, layers, keys, layer, beside, own)


def _all(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by every name that they have."""
    return module.named_parameters(remove_duplicate=False)


def _leaf(param: Tensor) -> Any:
    leaf = Lazy(tuple(param.shape), param.dtype, lambda _: param.detach().clone())
    return leaf if param.requires_grad else frozen(leaf)


def _unit(params: Mapping[str, Tensor]) -> Any:
    """A unit that stays one where some of its leaves are frozen."""
    tree = {name: _leaf(param) for name, param in params.items()}
    return tree if all(param.requires_grad for param in params.values()) else Unit(tree)


def _container(module: nn.Module, layers: str) -> nn.Module:
    lists = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) and name
    ]
    if layers not in lists:
        known = f"this module has {', '.join(lists)}" if lists else "this module has none"
        raise ValueError(f"functionalize: layers={layers!r} is no nn.ModuleList or nn.Sequential with layers; {known}")
    return module.get_submodule(layers)


def _beside(module: nn.Module, layers: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Parameters that the modules around the layers have themselves, and the outermost modules beside the layers."""
    for key, param in module._parameters.items():
        if param is not None:
            yield join(name, key), param
    if name == layers:
        return
    for key, child in module.named_children():
        path = join(name, key)
        if f"{layers}.".startswith(f"{path}."):
            yield from _beside(child, layers, path)
        elif any(True for _ in child.parameters()):
            yield path, child


def _stack(layers: str, keys: tuple[str, ...], parts: tuple[nn.Module, ...]) -> tuple[Stacked, dict[str, Place]]:
    """The stack of layers with equal parameters, and the place of each of these."""
    columns = [dict(_all(part)) for part in parts]
    first, names = columns[0], [name for name, _ in parts[0].named_parameters()]
    if not names:
        raise ValueError(f"functionalize: {layers}.{keys[0]} has no parameters")
    for key, column in zip(keys, columns, strict=True):
        here, there = f"{layers}.{key}", f"{layers}.{keys[0]}"
        if odd := sorted(column.keys() ^ first.keys()):
            has, lacks = (here, there) if odd[0] in column else (there, here)
            raise ValueError(f"functionalize: {has} has {odd[0]}, {lacks} has not; a stack has layers of one structure")
        for name, param in column.items():
            if _form(param) != _form(first[name]):
                raise ValueError(
                    f"functionalize: {here}.{name} is {_form(param)}, {there}.{name} {_form(first[name])}; a stack has "
                    "layers of one structure"
                )
        if _tied(column) != _tied(first):
            raise ValueError(f"functionalize: {here} ties other parameters to each other than {there}")
    owners: dict[int, str] = {}
    for key, column in zip(keys, columns, strict=True):
        for name in names:
            path = f"{layers}.{key}.{name}"
            if (other := owners.setdefault(id(column[name]), path)) != path:
                raise ValueError(
                    f"functionalize: {other} and {path} are one parameter, which a stack would untie; give each layer "
                    "its own"
                )
    kept = {id(first[name]): name for name in names}

    def load(name: str, layer: int | None) -> Tensor:
        if layer is None:
            return torch.stack([column[name].detach() for column in columns])
        return columns[layer][name].detach()

    def leaf(name: str) -> Any:
        param = first[name]
        made = Lazy((len(parts), *param.shape), param.dtype, partial(load, name))
        return made if param.requires_grad else frozen(made)

    return Stacked({name: leaf(name) for name in names}), {name: (layers, kept[id(p)]) for name, p in first.items()}


def _tied(column: Mapping[str, Tensor]) -> list[str]:
    """For each parameter the first name that it has."""
    first: dict[int, str] = {}
    return [first.setdefault(id(param), name) for name, param in column.items()]


def _form(param: Tensor) -> str:
    return f"{param.dtype} {tuple(param.shape)}{'' if param.requires_grad else ', which does not require grad'}"


def _refuse(module: nn.Module) -> None:
    """What a function of weights cannot do as the module does."""

    def no(name: str, why: str) -> None:
        raise TypeError(f"functionalize: {name or 'the module'} {why}")

    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod"):
            no(name, "is compiled; give the module that it was made of")
        if hooked(part):
            no(name, "has hooks, which would run inside of visits and again when they are recomputed; remove them")
        if "forward" in vars(part):
            no(name, "has another forward than its class, set on the instance (accelerate does so); remove that")
        if getattr(part, "gradient_checkpointing", False):
            no(name, "has gradient checkpointing on; turn it off: a schedule says what is recomputed (remat=)")
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            no(name, "keeps running statistics, which differ between ranks; use .eval(), or another norm")
    memory: dict[int, tuple[str, int]] = {}
    for name, param in _all(module):
        if type(param) is not nn.Parameter:
            no(name, f"is a {type(param).__name__}, not a plain nn.Parameter; give the module before it was changed")
        if param.is_meta:
            no(name, "is on the meta device and has no values; load the module first")
        if not param.is_floating_point():
            no(name, f"is {param.dtype}; parameters are floating point")
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            no(name, "has hooks on its gradient, which goes elsewhere; remove them")
        other, owner = memory.setdefault(param.data_ptr(), (name, id(param)))
        if param.numel() and owner != id(param):
            no(name, f"and {other} share memory but are two parameters; make them one, or clone one")
