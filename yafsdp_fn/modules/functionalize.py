"""functionalize, load_into: a torch module as a function of a tree of weights, and the weights back into the module."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from yafsdp_fn.modules.files import ModuleFiles
from yafsdp_fn.modules.tree import (
    Layers,
    ModuleTree,
    copied,
    given,
    kinds_of,
    refuse_hooks,
    refuse_writes,
    tree_of,
    without_weights,
)
from yafsdp_fn.nn.linear import embedding, linear
from yafsdp_fn.nn.low_rank import is_low_rank
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree, join, shape_of, without_markers
from yafsdp_fn.runtime.block_call import BlockCall, Row, rows_of
from yafsdp_fn.runtime.visit import visit
from yafsdp_fn.runtime.whole_layers import map_whole_layers
from yafsdp_fn.scan import apply
from yafsdp_fn.sharding import unshard
from yafsdp_fn.util.randomness import device_of_leaves, next_visit_seed, run_visit
from yafsdp_fn.util.torch_private import transforms_active

# ---- functionalize: turns a torch module into a function of a tree of weights, with its layers as a stack.
#
#     params, model = ya.functionalize(module, layers="model.layers")
#
#     params   {"model.embed_tokens": {"weight": ..},                         # a unit for each module beside the layers
#               "model.layers": Stacked({"mlp.up_proj.weight": .., ...}),     # a unit for each layer
#               "lm_head": {"weight": ..}}                                    # absent if it is tied to the embedding
#     model    the module's own forward, in which these modules and each layer are visits
#
# The forward runs on a copy of the module without weights (tree.py). Where it calls a layer, or a module beside the
# layers, a visit runs that module on the weights of its unit, as `ya.scan` and `ya.apply` would.


def functionalize(
    module: nn.Module, layers: Layers, *, files: str | os.PathLike[str] | None = None
) -> tuple[dict[str, Any], "Functionalized"]:
    """Returns `(params, model)`: the weights of `module` as a tree, and `model(params, ...)`, which computes
    `module(...)`.

        params, model = ya.functionalize(module, layers="model.layers")
        state = ya.shard(params, tx, mesh=mesh)          # copies a layer at a time, each rank keeps its part
        def loss(params, batch):
            logits = model(params, batch["tokens"], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        state, metrics = ya.train_step(loss, tx)(state, batch)
        ya.load_into(module, state.params)               # and back: gathered a layer at a time

    module: is read, not changed. Mode, buffers and settings are those of this moment: after `module.eval()` a second
        call gives the function for evaluation, of the same `params`
    layers: dotted name of the `nn.ModuleList` or `nn.Sequential` that has the layers, or of several, as for an encoder
        and a decoder. Layers of several kinds in one list (dense and with experts, attention and Mamba), known by
        names, shapes, dtypes and requires_grad of their parameters, are a stack for each kind
    files: a directory of safetensors with the parameters and buffers of `module`, by their names in its state_dict: its
        own are not looked at, so that parameters may be on the meta device. They are read when `ya.shard` asks for
        them, a layer at a time, each rank its own: no rank holds the whole

    params: a dict of units by module name, with leaves by parameter name, so that a leaf's path is its name in
        `module.state_dict()`, in a stack without the layer's number; of several kinds in one list, each stack is named
        by its first layer, `model.layers.0`. Each outermost module beside the layers that has
        parameters is a unit; so is a parameter that belongs to a module around the layers. Leaves are `ya.Lazy` and
        hold the module; those that do not require grad are `ya.frozen`. For `ya.shard`, `ya.materialize`, `ya.lora`
    model: differentiable in params and in tensor arguments, sharded or plain. Each layer is one visit by its own
        module, in the order of the module's own loop; a shared parameter is one leaf, visited wherever it is used.
        Random numbers are those of visits; everything between visits counts as one more visit

    Arguments and outputs of layers and of modules beside them are pytrees of tensors and plain values; other objects
    pass only where nothing is differentiated. So a cache is for `torch.no_grad()`: in training, pass `use_cache=False`.

    Raises TypeError or ValueError, naming the module or parameter: parameters shared between layers, on the meta
    device without files, of another class or not of floating point; hooks; forwards replaced on an instance; gradient
    checkpointing; running statistics in training. FileNotFoundError, TypeError or ValueError for files that do not fit.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 4), layers)
    >>> tree, model = ya.functionalize(module, layers="1")
    >>> torch.equal(model(ya.materialize(tree), torch.ones(2)), module(torch.ones(2)))
    True
    """
    found = None if files is None else ModuleFiles(files, module)
    tree = tree_of(module, layers, found)
    return tree.params, Functionalized(without_weights(module, found), tree.described())


@dataclasses.dataclass(frozen=True, eq=False)
class _Visited:
    """A module that runs as a visit. names: unit and leaf of its parameters, by their names in the module"""

    name: str
    module: nn.Module
    names: Mapping[str, tuple[str, str]]
    units: tuple[str, ...]

    def weights(self, units: Sequence[Tree]) -> dict[str, Any]:
        """Returns its parameters, by name."""
        of = dict(zip(self.units, units, strict=True))
        return {name: of[unit][leaf] if leaf else of[unit] for name, (unit, leaf) in self.names.items()}

    def cloned(self, units: Sequence[Tree]) -> dict[str, Tensor]:
        """Clones the parameters that belong to modules around the layers: a block whose outputs stay whole throughout
        the call."""
        return {name: weight.clone() for name, weight in self.weights(units).items()}

    def run(
        self, units: Sequence[Tree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Runs the module as a block of `apply`. torch's pytrees take the outputs apart, since they know the classes of
        transformers."""
        copies = copied(self.module, self.name, weights=self.weights(units))
        for _, original, made, _ in copies:
            if (straight := _straight(original, made)) is not None:
                vars(made)["forward"] = straight
        out = copies[0].made(*args, **kwargs)
        refuse_writes(copies)
        return torch_pytree.tree_flatten(out)

    def run_layer(
        self, carry: Tree, unit: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Runs the module as the block of a layer. carry: its first tensor, in a tuple, or in a dict if it has
        a name"""
        args, kwargs = (args, {**carry, **kwargs}) if isinstance(carry, dict) else ((*carry, *args), kwargs)
        return self.run((unit,), args, kwargs)


class _Skeleton(NamedTuple):
    """A module without weights, for one device and dtype, and its visited parts.

    around: parameters of modules around the layers; layers: by their stack; inside: ids of all modules below the
        visited ones
    """

    root: nn.Module
    around: _Visited
    beside: list[_Visited]
    layers: dict[str, list[_Visited]]
    inside: frozenset[int]


class Functionalized:
    """The function that `functionalize` returns: `model(params, *args, **kwargs)`."""

    def __init__(self, skeleton: nn.Module, tree: ModuleTree) -> None:
        self._base, self._tree = skeleton, tree
        self._skeletons: dict[tuple[torch.device, torch.dtype], _Skeleton] = {}

    def __repr__(self) -> str:
        return f"Functionalized({type(self._base).__name__}, layers={self._tree.layers!r})"

    def __call__(self, params: Mapping[str, Tree], *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward on `params`."""
        tree = self._tree
        if not isinstance(params, Mapping) or params.keys() != tree.units:
            found = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise TypeError(f"{self}: expected params with the units {sorted(tree.units)}, got {found}")
        rows = {unit: _rows(params[unit], unit, len(stack.layers)) for unit, stack in tree.stacks.items()}
        _, device, dtype = next(iter(rows.values()))
        skeleton = self._skeleton(device, dtype)
        forwards: dict[int, Callable[..., Any]] = {
            id(of.module): partial(_visit, of, [params[unit] for unit in of.units]) for of in skeleton.beside
        }
        for unit, layers in skeleton.layers.items():
            for index, (of, row) in enumerate(zip(layers, rows[unit][0], strict=True)):
                forwards[id(of.module)] = partial(_visit_layer, of, row, index == 0)
        around = skeleton.around
        own = apply(around.cloned, [params[unit] for unit in around.units]) if around.names else {}
        copies = copied(skeleton.root, weights=own, forwards=forwards)
        out = copies[0].made(*args, **kwargs)
        refuse_hooks([made for made in copies if id(made.original) in skeleton.inside])
        refuse_writes(copies, buffers_only=True)
        return out

    def name_of(self, name: str) -> str:
        """Returns the name in `module.state_dict()` of a weight that `ya.named_weights` names: a stack counts its own
        layers, which may be every second one of a list."""
        for unit, stack in self._tree.stacks.items():
            layer, _, leaf = name.removeprefix(f"{unit}.").partition(".")
            if name.startswith(f"{unit}.") and layer.isdigit() and int(layer) < len(stack.layers):
                return join(stack.layers[int(layer)], leaf)
        return name

    def _skeleton(self, device: torch.device, dtype: torch.dtype) -> _Skeleton:
        """Returns the skeleton with buffers on `device`, for weights of `dtype`."""
        key = device, dtype
        if key not in self._skeletons:
            tree, (root, real) = self._tree, given(self._base, device, dtype)
            beside = [_visited(root, name, names) for name, names in tree.beside.items()]
            layers = {
                unit: [_visited(root, name, places) for name in names] for unit, (names, places) in tree.stacks.items()
            }
            below = (
                part
                for of in (*beside, *chain(*layers.values()))
                for part in of.module.modules()
                if part is not of.module
            )
            made = _Skeleton(root, _visited(root, "", tree.own), beside, layers, frozenset(map(id, below)))
            if not real:
                return made
            self._skeletons[key] = made
        return self._skeletons[key]


def _visited(root: nn.Module, name: str, names: Mapping[str, tuple[str, str]]) -> _Visited:
    return _Visited(name, root.get_submodule(name), names, tuple(dict.fromkeys(unit for unit, _ in names.values())))


def _straight(original: nn.Module, made: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the forward of a plain `nn.Linear` or `nn.Embedding`, by which its gradient goes directly into its slot.
    It holds weights and not the module, which holds it: such a cycle waits for the garbage collector."""
    weights: Any = made._parameters
    if type(original) is nn.Linear:
        return partial(_linear, weights["weight"], weights["bias"])
    if type(original) is nn.Embedding and original.padding_idx is None and original.max_norm is None:
        plain = not original.scale_grad_by_freq and not original.sparse
        return partial(_embedding, weights["weight"]) if plain else None
    return None


def _linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    return linear(input, weight, bias)


def _embedding(weight: Tensor, input: Tensor) -> Tensor:
    return embedding(input, weight)


def _visit(of: _Visited, units: list[Tree], *args: Any, **kwargs: Any) -> Tree:
    _check((args, kwargs), f"{of.name} is called with")
    out, spec = apply(of.run, units, args, kwargs)
    _check(out, f"{of.name} returns")
    return torch_pytree.tree_unflatten(out, spec)


def _visit_layer(of: _Visited, row: Tree, first: bool, *args: Any, **kwargs: Any) -> Tree:
    _check((args, kwargs), f"{of.name} is called with")
    carry: Any = args[:1]
    if not args:
        key = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), None)
        carry = {} if key is None else {key: kwargs.pop(key)}
    given = carry, row, args[1:], kwargs
    if isinstance(row, Row):
        name = "{}[{}]".format(*of.name.rsplit(".", 1))
        out, spec = visit(BlockCall(name, of.run_layer, given, first=first, signature=of.run_layer, carries=True))
    else:
        out, spec = run_visit(next_visit_seed(), device_of_leaves(given), of.run_layer, *given)
    _check(out, f"{of.name} returns")
    return torch_pytree.tree_unflatten(out, spec)


def _rows(stack: Tree, name: str, count: int) -> tuple[list[Tree], torch.device, torch.dtype]:
    """Returns the weights of each layer, or their placeholders in a visit, and the device and dtype that blocks see."""
    if isinstance(stack, Sharded):
        if stack.entry.length != count:
            raise ValueError(f"{name}: the module has {count} layers, these params {stack.entry.length}")
        owner = stack.owner
        return list[Tree](rows_of(stack)), owner.comms.device, owner.precision.gather_dtype
    leaves, spec = optree.tree_flatten(without_markers(stack))
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,)), None)
    if wrong is not None or not leaves:
        raise ValueError(
            f"{name}: expected a sharded stack, or tensors with a leading axis of {count} layers, got "
            f"{shape_of(wrong)}; tensors come from ya.materialize, a state from ya.shard"
        )
    columns = [leaf.unbind() for leaf in leaves]
    smooth = next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), torch.float32)
    return [optree.tree_unflatten(spec, row) for row in zip(*columns, strict=True)], leaves[0].device, smooth


PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""The types that arguments and outputs of visits consist of."""


def _check(tree: Tree, what: str) -> None:
    """Raises if a differentiated visit takes or returns objects whose tensors autograd cannot see, and a recomputation
    cannot repeat."""
    if not torch.is_grad_enabled() and not transforms_active():
        return
    for leaf in optree.tree_leaves(tree):
        if not isinstance(leaf, PLAIN):
            kind = type(leaf).__name__
            hint = "pass use_cache=False" if "Cache" in kind else "pass tensors, or call it under torch.no_grad()"
            raise TypeError(
                f"{what} a {kind}, whose tensors would get no gradient, and which a recomputation would find changed: "
                f"{hint}"
            )


# ---- load_into: writes weights back into the module that `functionalize` has read, gathered a layer at a time.


@torch.no_grad()
def load_into(module: nn.Module, params: Mapping[str, Tree], *, model: Functionalized | None = None) -> None:
    """Writes `params` into the parameters of `module`, in their dtypes; adapters (`ya.lora`) are added to weights.

    module: the one that `functionalize` has read, or another of the same class and config
    params: of a state (every rank must call, and each writes into its own module), or plain tensors
    model: the function that `functionalize` returned with these params. It knows which layers each stack is of: needed
        where some layers of a list were frozen, and not its first or last ones alone

    Only one layer, or one module beside the layers, is whole at a time. Raises TypeError or ValueError, naming the
    parameter, if one is missing, of another shape, or without memory; before anything is gathered if names tell.

    >>> module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    >>> tree, model = ya.functionalize(module, layers="0")
    >>> sgd = ya.optim.sgd(0.1)
    >>> step = ya.train_step(lambda params, x: model(params, x).square().mean(), sgd)
    >>> state, _ = step(ya.shard(tree, sgd, mesh=mesh), torch.ones(1, 4))
    >>> ya.load_into(module, state.params)                     # what was trained is in the module
    >>> torch.equal(module(torch.ones(4)), model(ya.unshard(state.params), torch.ones(4)))
    True
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
    stacks = {name: unit for name, unit in params.items() if _is_stack(name, unit, target)}
    layers_of = _layers(stacks, modules, model)

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
        if name in stacks:
            layers = iter(layers_of[name])
            map_whole_layers(lambda weights, layers=layers: write(next(layers), weights), unit)
        else:
            write(name, without_markers(unshard(unit)))
    if left:
        raise ValueError(f"load_into: these params have no {next(iter(left.values()))}; give all of a state's params")


def _layers(
    stacks: Mapping[str, Tree], modules: Mapping[str, nn.Module], model: Functionalized | None
) -> dict[str, Sequence[str]]:
    """Returns the names of the layers that each stack is of. Raises ValueError if they are not known."""
    keys: dict[str, Sequence[str]] = {}
    counts: dict[str, int | None] = {}
    for name, unit in stacks.items():
        if isinstance(unit, Sharded):
            keys[name], counts[name] = unit.entry.spec.entries(), unit.entry.length
        else:
            whole = without_markers(unit)
            keys[name], counts[name] = list(whole), len(optree.tree_leaves(whole)[0])
    if model is None:
        found = _dealt(keys, counts, modules)
    else:
        found = {name: stack.layers for name, stack in model._tree.stacks.items()}
    for name, count in counts.items():
        if len(names := found.get(name, ())) != count:
            raise ValueError(
                f"load_into: {name} is a stack of {count} layers, and of the module's these are known to be in it: "
                f"{', '.join(names) or 'none'}. Layers that do not require grad are a stack apart; if some did not in "
                "ya.functionalize, pass the function that it returned: load_into(module, params, model=model)"
            )
    return found


def _dealt(
    keys: Mapping[str, Sequence[str]], counts: Mapping[str, int | None], modules: Mapping[str, nn.Module]
) -> dict[str, Sequence[str]]:
    """Deals a module's layers to stacks, as far as names and numbers of layers leave one way to do it. What requires
    grad is not asked: it may be other layers than in `functionalize`, or all of a new module."""
    dealt: dict[str, list[str]] = {name: [] for name in keys}
    lists = {name: part for name, part in modules.items() if isinstance(part, nn.ModuleList | nn.Sequential)}
    for kind, parts in chain.from_iterable(kinds_of(part, name, grad=False).items() for name, part in lists.items()):
        named = [name for name in keys if (name == kind or name in parts) and _has(parts, keys[name])]
        first = {next(iter(parts)) if name == kind else name: name for name in named}
        begun: list[str] = []
        for layer in parts if named else ():
            lacking = [name for name in begun if len(dealt[name]) < (counts[name] or 0)]
            if layer in first:
                begun.append(first[layer])
                dealt[first[layer]].append(layer)
            elif len(lacking) == 1:
                dealt[lacking[0]].append(layer)
    return dict(dealt)


def _has(layers: Mapping[str, nn.Module], names: Sequence[str]) -> bool:
    """Returns whether these layers have parameters of these names."""
    return {name for name, _ in next(iter(layers.values())).named_parameters(remove_duplicate=False)} >= set(names)


def _is_stack(name: str, unit: Tree, target: Mapping[str, Tensor]) -> bool:
    if isinstance(unit, Sharded):
        return unit.entry.length is not None
    whole = without_markers(unit)
    if name in target:
        return False
    of_one = [(leaf, target.get(join(name, key))) for key, leaf in whole.items()]
    return all(there is None or len(leaf.shape) > there.ndim for leaf, there in of_one)
