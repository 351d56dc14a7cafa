"""functionalize, load_into: a torch module as a function of a tree of weights, and the weights back into the module."""

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as torch_pytree

from yafsdp_fn.api.scan import apply, run_block
from yafsdp_fn.api.sharding import unshard
from yafsdp_fn.modules.files import ModuleValues
from yafsdp_fn.modules.tree import (
    Computes,
    Layers,
    Place,
    Places,
    bits_of,
    copied,
    hooks_below,
    placed,
    refuse_hooks,
    tensors_beside,
    tree_of,
    without_weights,
    writes,
)
from yafsdp_fn.nn.linear import embedding, linear
from yafsdp_fn.params.markers import without_markers
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree, join, shape_of
from yafsdp_fn.runtime.block_call import BlockCall, HandleWeights, rows_of
from yafsdp_fn.runtime.whole_layers import map_whole_layers, plain_layers
from yafsdp_fn.util.foreign_names import hint
from yafsdp_fn.util.torch_private import handled, transforms_active

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
    module: nn.Module,
    layers: Layers,
    *,
    files: str | os.PathLike[str] | None = None,
    compute: Computes | None = None,
) -> tuple[dict[str, Any], "Functionalized"]:
    """Returns `(params, model)`: the weights of `module` as a tree, and `model(params, ...)`, which computes
    `module(...)`.

        params, model = ya.functionalize(module, layers="model.layers")
        state = ya.shard(params, tx, mesh=mesh)          # copies a layer at a time, each rank keeps its part
        def loss(params, batch):
            logits = model(params, batch["tokens"], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        state, metrics = ya.train_step(loss, tx)(state, batch)
        ya.load_into(module, state.params, model=model)  # and back: gathered a layer at a time

    module: is read, not changed. Mode, buffers and settings are those of this moment: after `module.eval()` a second
        call gives the function for evaluation, of the same `params`
    layers: dotted name of the `nn.ModuleList` or `nn.Sequential` that has the layers, or of several, as for an encoder
        and a decoder. Layers of several kinds in one list (dense and with experts, attention and Mamba), known by
        names, shapes, dtypes (also by `compute`) and requires_grad of their parameters, are a stack for each kind
    files: a directory of safetensors with the parameters and buffers of `module`, by their names in its state_dict: its
        own are not looked at, so that parameters may be on the meta device. They are read when `ya.shard` asks for
        them, a layer at a time, each rank its own: no rank holds the whole
    compute: dtypes of parameters of their own, over `Precision.compute`, by names in which `*` stands for anything:
        `{"*.A_log": torch.float32}`; of several that fit the last; None for none. What transformers keeps in float32
        beside bfloat16 (`_keep_in_fp32_modules_strict`) has it without being named

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
    values = ModuleValues(module, files)
    params, places = tree_of(module, layers, values, compute or {})
    _MODES.setdefault(module, set()).add(module.training)
    return params, Functionalized(without_weights(module, values), layers, places, weakref.ref(module))


_MODES: weakref.WeakKeyDictionary[nn.Module, set[bool]] = weakref.WeakKeyDictionary()
"""The modes in which modules have been read: whether they were training."""

CHANGED = (
    "module.eval() or module.train() since ya.functionalize read the module: this function keeps the mode of that "
    "time. `_, answer = ya.functionalize(module.eval(), ...)` is the function for evaluation of the same params"
)


class _Visited:
    """A module that runs as a visit. places: the unit and leaf of its parameters, by their names in it"""

    def __init__(self, name: str, module: nn.Module, places: Mapping[str, Place]) -> None:
        self.name, self.module, self.places = name, module, places
        self.units = list(dict.fromkeys(unit for unit, _ in places.values()))

    def weights(self, units: Sequence[Tree]) -> dict[str, Any]:
        """Returns its parameters, by name."""
        of = dict(zip(self.units, units, strict=True))
        return {name: of[unit][leaf] if leaf else of[unit] for name, (unit, leaf) in self.places.items()}

    def cloned(self, units: Sequence[Tree]) -> dict[str, Tensor]:
        """Clones the parameters that belong to modules around the layers: a block whose outputs stay whole throughout
        the call."""
        return {name: weight.clone() for name, weight in self.weights(units).items()}

    def run(
        self, units: Sequence[Tree], args: tuple[Any, ...], kwargs: dict[str, Any], hooked: tuple[str, ...]
    ) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Runs the module as a block of `apply`; returns its output, and those of the modules below it that have hooks,
        in the order of their calls. torch's pytrees take the outputs apart, since they know the classes of
        transformers.

        hooked: the names of these modules
        """
        seen: list[tuple[str, Any]] = []
        # its lists and dicts are copies where arguments are taken apart: what is added to them goes nowhere
        given: Any = args, kwargs
        before = optree.tree_structure(given)
        with copied(self.module, self.name, self.weights(units)) as made:
            for part in made.modules():
                if (straight := _straight(part)) is not None:
                    vars(part)["forward"] = straight
            for path in hooked:
                made.get_submodule(path).register_forward_hook(partial(_note, seen, path))
            # not made(...): hooks of all modules, which torch keeps, have been called around it
            out = made.forward(*args, **kwargs)
        if optree.tree_structure(given) != before:
            raise RuntimeError(
                f"{self.name} writes to a list or dict that it is called with, and a visit has one of its own: what it "
                "writes would be lost. Return it instead"
            )
        return torch_pytree.tree_flatten((out, seen))

    def run_layer(
        self, carry: Tree, unit: Tree, args: tuple[Any, ...], kwargs: dict[str, Any], hooked: tuple[str, ...]
    ) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Runs the module as the block of a layer. carry: its first tensor, in a tuple, or in a dict if it has
        a name"""
        if isinstance(carry, dict):
            return self.run([unit], args, {**carry, **kwargs}, hooked)
        return self.run([unit], (*carry, *args), kwargs, hooked)


class _Skeleton(NamedTuple):
    """A module without weights, for one device and dtype, and its visited parts. own: parameters of modules around the
    layers, as if they were one part"""

    root: nn.Module
    own: _Visited
    visited: list[_Visited]


class Functionalized:
    """The function that `functionalize` returns: `model(params, *args, **kwargs)`."""

    def __init__(self, skeleton: nn.Module, layers: Layers, places: Places, module: "weakref.ref[nn.Module]") -> None:
        self._module = module
        self._base, self._layers, self._places = skeleton, layers, places
        self._units = {unit for part in places.visits.values() for unit, _ in part.values()}
        self._skeletons: dict[tuple[torch.device, torch.dtype, bool], _Skeleton] = {}
        self._calls = 0

    def __repr__(self) -> str:
        return f"Functionalized({type(self._base).__name__}, layers={self._layers!r})"

    if not TYPE_CHECKING:  # a type checker is to see misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"'Functionalized' object has no attribute '{name}'{hint(f'model.{name}')}")

    def __call__(self, params: Mapping[str, Tree], *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward on `params`."""
        self._check(params)
        module = self._module()
        if module is not None and module.training not in _MODES[module]:
            warnings.warn(CHANGED, stacklevel=2)
        stacks = self._places.stacks
        rows: dict[str, Tree] = {}  # the weights of a layer, or their placeholders in a visit
        for unit, layers in stacks.items():
            rows |= zip(layers, _rows(params[unit]), strict=True)
        firsts = {layers[0] for layers in stacks.values()}
        called = set[int]()  # hooks that were given while the model ran
        root, own, visited = self._skeleton(*_seen_as(params[next(iter(stacks))]))
        weights = apply(own.cloned, [params[unit] for unit in own.units]) if own.units else {}
        # Buffers and attributes are shared with the skeleton, parameters around the layers are copies of this call:
        # a write to one of them is lost, or differs between ranks. No version counts those through `.data`.
        kept = {**tensors_beside(root), **weights} if self._looks() else {}
        before = bits_of(kept)
        with copied(root, "", weights, may_note=True) as made:
            for of in visited:
                units = [rows[of.name]] if of.name in rows else [params[unit] for unit in of.units]
                part = made.get_submodule(of.name)
                vars(part)["forward"] = partial(_visit, of, units, of.name in firsts, weakref.ref(part), called)
            out = made(*args, **kwargs)
            for of in visited:
                refuse_hooks(made.get_submodule(of.name), of.name, called)
        after = bits_of(kept)
        for name in kept:
            if before.get(name) != after.get(name):
                path, _, key = name.rpartition(".")
                raise writes(path, key)
        return out

    def _looks(self) -> bool:
        """Returns whether this call compares what the module has beside its parameters: the calls 1, 2, 4, 8 and so on
        of those that may be differentiated do."""
        if not torch.is_grad_enabled() or transforms_active() or handled():
            return False
        self._calls += 1
        return self._calls.bit_count() == 1

    def _check(self, params: Mapping[str, Tree]) -> None:
        """Raises TypeError or ValueError unless `params` have the units of this module, with as many layers."""
        if not isinstance(params, Mapping):
            kind = type(params).__name__
            raise TypeError(f"{self}: expected the params of ya.functionalize, got {kind}; a state has .params")
        if params.keys() != self._units:
            raise TypeError(f"{self}: expected params with the units {sorted(self._units)}, got {sorted(params)}")
        for unit, layers in self._places.stacks.items():
            _must_be_stack(params[unit], unit, len(layers))

    def name_of(self, name: str, layer: int | None = None) -> str:
        """Returns the name in `module.state_dict()` of a weight that `ya.named_weights` names, or of the path and layer
        of a leaf, as `ya.checkpoint.save_named` gives them: a stack counts its own layers, which may be every second
        one of a list."""
        for unit, layers in self._places.stacks.items():
            for number, of_layer in enumerate(layers):
                prefix = f"{unit}.{number}." if layer is None else f"{unit}."
                if layer in (None, number) and name.startswith(prefix):
                    return join(of_layer, name.removeprefix(prefix))
        return name

    def _skeleton(self, device: torch.device, dtype: torch.dtype, converted: bool) -> _Skeleton:
        """Returns the skeleton with buffers on `device`, for weights of `dtype`. converted: those that have a dtype of
        their own are of that"""
        key = device, dtype, converted
        if key in self._skeletons:
            return self._skeletons[key]
        root = placed(self._base, device, dtype, self._places.own if converted else {})
        visits = self._places.visits
        own = {name: places[""] for name, places in visits.items() if "" in places}
        visited = [_Visited(name, root.get_submodule(name), visits[name]) for name in visits if name not in own]
        made = _Skeleton(root, _Visited("", root, own), visited)
        if not any(isinstance(buffer, FakeTensor) for buffer in root.buffers()):  # else a trace ends with its tensors
            self._skeletons[key] = made
        return made


def _straight(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the forward of a plain `nn.Linear` or `nn.Embedding`, by which its gradient goes directly into its slot.
    It holds weights and not the module, which holds it: such a cycle waits for the garbage collector."""
    weights: Any = part._parameters
    weight, bias = weights.get("weight"), weights.get("bias")
    if type(part) is nn.Linear:
        return lambda input: linear(input, weight, bias)
    if type(part) is nn.Embedding:
        settings = part.padding_idx, part.max_norm, part.scale_grad_by_freq
        if settings == (None, None, False):  # sparse: gradients travel dense in any case
            return lambda input: embedding(input, weight)
    return None


def _note(seen: list[tuple[str, Any]], path: str, module: nn.Module, args: Any, output: Any) -> None:
    seen.append((path, output))


def _visit(
    of: _Visited,
    units: list[Tree],
    first: bool,
    part: "weakref.ref[nn.Module]",
    called: set[int],
    *args: Any,
    **kwargs: Any,
) -> Tree:
    """Runs a visit in place of the forward of `of`, then the hooks of modules below it, on their outputs.

    first: it is the first layer of its stack; part: the module of this call, which may have been given hooks;
    called: gets their numbers
    """
    _check_plain((args, kwargs), f"{of.name} is called with")
    below = part()
    assert below is not None
    hooks = hooks_below(below)
    hooked = tuple(hooks)
    for found in hooks.values():
        called.update(found)
    if isinstance(units[0], HandleWeights):
        carry: Any = args[:1]
        if not args:
            key = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), None)
            carry = {} if key is None else {key: kwargs.pop(key)}
        name = "{}[{}]".format(*of.name.rsplit(".", 1))
        given = carry, units[0], args[1:], kwargs, hooked
        call = BlockCall(name, of.run_layer, given, first=first, signature=of.run_layer, carries=True)
        out, spec = run_block(call)
    else:
        out, spec = apply(of.run, units, args, kwargs, hooked)
    _check_plain(out, f"{of.name} returns")
    output, seen = torch_pytree.tree_unflatten(out, spec)
    for path, result in seen:
        for hook in hooks[path].values():
            if hook(below.get_submodule(path), (), result) is not None:
                raise RuntimeError(
                    f"{join(of.name, path)}: a hook returns another output for it, but is called after the visit of "
                    f"{of.name}, which has used the first one; return None"
                )
    return output


def _rows(stack: Tree) -> list[Tree]:
    """Returns the weights of each layer, or their placeholders in a visit."""
    return list[Tree](rows_of(stack)) if isinstance(stack, Sharded) else plain_layers(stack)


def _must_be_stack(stack: Tree, name: str, count: int) -> None:
    """Raises ValueError unless these are the weights of `count` layers."""
    if isinstance(stack, Sharded):
        if stack.entry.length != count:
            raise ValueError(f"{name}: the module has {count} layers, these params {stack.entry.length}")
        return
    leaves = optree.tree_leaves(stack)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.shape[:1] != (count,)]
    if wrong or not leaves:
        raise ValueError(
            f"{name}: expected a sharded stack, or tensors with a leading axis of {count} layers, got "
            f"{shape_of(next(iter(wrong), None))}; tensors come from ya.materialize, a state from ya.shard"
        )


def _seen_as(stack: Tree) -> tuple[torch.device, torch.dtype, bool]:
    """Returns the device and dtype in which blocks see the weights of a stack, and whether some have their own."""
    if isinstance(stack, Sharded):
        return stack.owner.comms.device, stack.owner.precision.gather_dtype, True
    leaves: list[Any] = optree.tree_leaves(stack)
    return leaves[0].device, next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), torch.float32), False


PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""The types that arguments and outputs of visits consist of."""


def _check_plain(tree: Tree, what: str) -> None:
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
def load_into(module: nn.Module, params: Mapping[str, Tree], *, model: Functionalized) -> None:
    """Writes `params` into the parameters of `module`, in their dtypes; adapters (`ya.lora`) are added to weights.

    module: the one that `functionalize` has read, or another of the same class and config
    params: of a state (every rank must call, and each writes into its own module), or plain tensors
    model: the function that `functionalize` returned with these params, which knows the layers of each stack

    Only one layer, or one module beside the layers, is whole at a time. Raises TypeError or ValueError, naming the
    parameter, if one is missing, of another shape, or without memory; before anything is gathered if names tell.

    >>> module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    >>> tree, model = ya.functionalize(module, layers="0")
    >>> sgd = ya.optim.sgd(0.1)
    >>> step = ya.train_step(lambda params, x: model(params, x).square().mean(), sgd)
    >>> state, _ = step(ya.shard(tree, sgd, mesh=mesh), torch.ones(1, 4))
    >>> ya.load_into(module, state.params, model=model)        # what was trained is in the module
    >>> torch.equal(module(torch.ones(4)), model(ya.unshard(state.params), torch.ones(4)))
    True
    """
    model._check(params)
    places = model._places
    names = {
        join(part, key): (part if place[0] in places.stacks else "", place)
        for part, of_part in places.visits.items()
        for key, place in of_part.items()
    }
    target = dict(module.named_parameters(remove_duplicate=False))
    if meta := next((name for name, param in target.items() if param.is_meta), None):
        raise ValueError(f"load_into: {meta} is on the meta device, where values are lost; module.to_empty(device=...)")
    # a layer that stands in a list twice has two names
    known = {id(target[name]) for name in names.keys() & target.keys()}
    if odd := sorted(name for name in names.keys() ^ target.keys() if id(target.get(name)) not in known):
        where = "the module" if odd[0] in target else "these params"
        raise ValueError(
            f"load_into: {odd[0]} is in {where} alone; give the module that these params come from, or one like it"
        )
    # a parameter with two names is written by the first
    first: dict[tuple[str, Place], str] = {}
    for name, place in names.items():
        one = first.setdefault(place, name)
        if target[name] is not target[one]:
            raise ValueError(
                f"load_into: {one} and {name} are one parameter in these params, and two there, of which the second "
                "would stay as it is; tie them first (module.tie_weights())"
            )

    def write(prefix: str, weights: Tree) -> None:
        leaves: Mapping[str, Any] = weights if isinstance(weights, Mapping) else {"": weights}
        for key, leaf in leaves.items():
            name = join(prefix, key)
            whole = leaf if isinstance(leaf, Tensor) else leaf.merged()
            there = target[name]
            if there.shape != whole.shape or not there.is_floating_point():
                raise ValueError(
                    f"load_into: {name}, of shape {tuple(whole.shape)}, is there of shape {tuple(there.shape)} and "
                    f"{there.dtype}; expected one of floating point, of the same shape"
                )
            there.copy_(whole)

    for name, unit in params.items():
        if name in places.stacks:
            layers = iter(places.stacks[name])
            map_whole_layers(lambda weights, layers=layers: write(next(layers), weights), unit)
        else:
            write(name, without_markers(unshard(unit)))
