"""The parameters of a torch module as a tree of units, and the module without its weights."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from yafsdp_fn.modules.files import ModuleFiles
from yafsdp_fn.params.sources import Lazy
from yafsdp_fn.params.tree import Stacked, Unit, frozen, join

# ---- A module without its weights, and copies of it for one call, which `functionalize` runs.
#
#     skeleton = without_weights(module)          # its structure, with an `Absent` in place of each parameter
#     copies = copied(skeleton, weights=..)       # for one call: other weights, other forwards, all else shared
#     out = copies[0].made(*args)
#     refuse_writes(copies)                       # what a forward writes to itself would be lost with the copy
#
# Nothing here changes once it is made, so several threads may call at once, autograd's among them.

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The attributes in which a module keeps its hooks: the first four hold them, the others say how they are called."""

OWN = {"_parameters", "_buffers", "_modules", "forward", "_flat_weights", "_flat_weight_refs", *HOOKS}
"""The attributes that `copied` makes anew; nn.LSTM and the like list their weights a second time."""

OF_HOOKS = "_output_capturing_hooks_installed"
"""The mark that transformers leaves on a model whose parts its forward gave hooks; those of a copy end with it."""


class Absent(Tensor):
    """The shape, dtype and device of an absent weight; any computation with it raises, naming it."""

    _name: str

    @staticmethod
    def of(like: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> "Absent":
        """Makes the placeholder of the parameter `like`."""
        made: Absent = Tensor._make_wrapper_subclass(Absent, like.shape, dtype=dtype, device=device)
        made._name = name
        made._is_param = True  # for isinstance(.., nn.Parameter)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        given: Any = [args, kwargs or {}]
        found = next(leaf._name for leaf in optree.tree_leaves(given) if isinstance(leaf, Absent))
        raise RuntimeError(
            f"{found} is not there now: weights are while the module that has them, or the outermost one around it "
            "beside the layers, runs its forward. The model uses it in another way: it calls a part of that module by "
            "itself, reads the weight from outside, or holds it by a reference that is no submodule or parameter"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self._name!r})"


def without_weights(module: nn.Module, files: ModuleFiles | None = None) -> nn.Module:
    """Returns a deep copy of `module` without its parameters, with the buffers of its files."""
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        memo.setdefault(id(param), Absent.of(param, name, param.device, param.dtype))
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        what = f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}"
        raise TypeError(f"functionalize: {what}; take out what cannot, such as process groups and files") from error
    if files is not None:
        for path, part in made.named_modules():
            part._buffers |= {key: files.read(join(path, key)) for key in part._buffers if join(path, key) in files}
    return made


class Copied(NamedTuple):
    """A module of a skeleton and its copy. name: dotted; versions: of its buffers when it was copied"""

    name: str
    original: nn.Module
    made: nn.Module
    versions: dict[str, int]


def copied(
    module: nn.Module,
    name: str = "",
    *,
    weights: Mapping[str, Any] = {},
    forwards: Mapping[int, Callable[..., Any]] = {},
) -> list[Copied]:
    """Returns shallow copies of `module`, first in the list, and of all modules below it; buffers and settings are
    shared.

    name: of `module`, for errors; weights: replace its parameters, by name below `module`; forwards: replace modules'
    own, by id of the module
    """
    found: dict[int, Copied] = {}
    _copy(module, "", name, weights, forwards, found)
    return list(found.values())


def _copy(
    part: nn.Module,
    path: str,
    name: str,
    weights: Mapping[str, Any],
    forwards: Mapping[int, Callable[..., Any]],
    found: dict[int, Copied],
) -> nn.Module:
    # not nested in `copied`: a recursive closure would hold the weights until the garbage collector runs
    if id(part) in found:
        return found[id(part)].made
    made: nn.Module = object.__new__(type(part))
    own = vars(made)
    own.update(vars(part))
    own |= {hooks: OrderedDict() for hooks in HOOKS}
    own["_parameters"] = {key: weights.get(join(path, key), param) for key, param in part._parameters.items()}
    own["_buffers"] = dict(part._buffers)
    found[id(part)] = Copied(join(name, path), part, made, _versions(part))
    own["_modules"] = {
        key: None if sub is None else _copy(sub, join(path, key), name, weights, forwards, found)
        for key, sub in part._modules.items()
    }
    if id(part) in forwards:
        own["forward"] = forwards[id(part)]
    return made


def given(skeleton: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, bool]:
    """The skeleton for weights of `dtype` on `device`, with its buffers there, and whether they are real tensors."""
    absent = {name: Absent.of(p, name, device, dtype) for name, p in skeleton.named_parameters(remove_duplicate=False)}
    copies, real = copied(skeleton, weights=absent), True
    for _, _, made, _ in copies:
        for key, buffer in made._buffers.items():
            if buffer is not None:
                made._buffers[key] = moved = buffer.to(device)
                real &= type(moved) is type(buffer)
    return copies[0].made, real


def refuse_writes(copies: Sequence[Copied], *, buffers_only: bool = False) -> None:
    """Raises RuntimeError if a call has changed a buffer or an attribute, which would be lost, or differ
    between ranks."""
    for name, original, made, versions in copies:
        before, after = vars(original), vars(made)
        names = (
            []
            if buffers_only
            else [key for key in after if key not in {*OWN, OF_HOOKS} and after[key] is not before.get(key)]
        )
        now, kept = _versions(made), original._buffers
        names += [key for key in versions if now.get(key) != versions[key] or made._buffers[key] is not kept[key]]
        names += [key for key in now if key not in versions]
        if names:
            raise RuntimeError(
                f"{name or 'the module'} writes to its {', '.join(names)} while it runs. A function keeps nothing: a "
                "recomputation would write again, and ranks differ. Return it instead, or switch it off (running "
                "statistics, power iterations, positions that grow)"
            )


def refuse_hooks(copies: Sequence[Copied]) -> None:
    """Raises RuntimeError if a module inside a visit got a hook, whose results could not leave the visit with their
    gradient."""
    for name, _, made, _ in copies:
        if hooked(made):
            raise RuntimeError(
                f"{name} was given a hook while the model ran, which cannot be called inside of a visit; transformers "
                "does so for output_attentions, output_hidden_states and router outputs: leave them off"
            )


def hooked(module: nn.Module) -> bool:
    return any(vars(module).get(hooks) for hooks in HOOKS[:4])


def _versions(module: nn.Module) -> dict[str, int]:
    return {key: 0 if b is None or b.is_inference() else b._version for key, b in module._buffers.items()}


# ---- Arranges the parameters of a module as a tree of units, with its layers as stacks, or says why it cannot.
#
# module.model.embed_tokens.weight         ->  {"model.embed_tokens": {"weight": Lazy [V, E]},
# module.model.layers[i].mlp.up.weight     ->   "model.layers": Stacked({"mlp.up.weight": Lazy [L, F, E]}), module.scale
# ->   "scale": Lazy}
#
# A list with layers of several kinds is a stack for each kind, named by its first layer: "model.layers.0" has layers
# 0, 2, 4, and "model.layers.1" layers 1, 3, 5. They are visited where the module calls them.

Place = tuple[str, str]
"""The unit that holds a parameter, and its leaf there; "" if the unit is the parameter."""

Layers = str | Sequence[str]
"""The dotted name of a list of layers, or of several."""


class Stack(NamedTuple):
    """Layers of one kind. layers: their dotted names; places: (unit, leaf) by a parameter's name in a layer"""

    layers: tuple[str, ...]
    places: Mapping[str, Place]


@dataclasses.dataclass(frozen=True)
class ModuleTree:
    """The tree of a module, and where in it each parameter is.

    stacks: by unit, the layers of one kind
    beside: for each module visited beside the layers, (unit, leaf) by a parameter's name in it
    own: for parameters that belong to modules around the layers, by dotted name; a leaf "" is a unit
    """

    params: dict[str, Any]
    layers: Layers
    stacks: Mapping[str, Stack]
    beside: Mapping[str, Mapping[str, Place]]
    own: Mapping[str, Place]

    @property
    def units(self) -> frozenset[str]:
        return frozenset(self.params)

    def described(self) -> "ModuleTree":
        """Returns this without the leaves, which hold the module."""
        return dataclasses.replace(self, params=dict.fromkeys(self.params))


def tree_of(module: nn.Module, layers: Layers, files: ModuleFiles | None = None) -> ModuleTree:
    """Reads `module`, or the files that have its values. Raises as `functionalize` does."""
    lists = [layers] if isinstance(layers, str) else list(layers)
    if not lists:
        raise ValueError("functionalize: layers=[]: expected the name of a list of layers, or several")
    kinds = [kind for name in lists for kind in kinds_of(_container(module, name, lists), name).items()]
    _refuse(module, files)
    inside: dict[int, str] = {}
    params: dict[str, Any] = {}
    stacks: dict[str, Stack] = {}
    for unit, parts in kinds:
        params[unit], places = _stack(unit, parts, inside, files)
        stacks[unit] = Stack(tuple(parts), places)
    own: dict[str, Place] = {}
    beside: dict[str, dict[str, Place]] = {}
    seen: dict[int, Place] = {}
    for name, part in _beside(module, lists):
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
            params |= {name: _leaf(name, part, files)} if new else {}
        else:
            beside[name] = places
            params |= {name: _unit(name, new, files)} if new else {}
    return ModuleTree(params, layers, stacks, beside, own)


def kinds_of(container: nn.Module, name: str, *, grad: bool = True) -> dict[str, dict[str, nn.Module]]:
    """Returns the layers of a list that have parameters, by the name of their stack: of one kind are those with equal
    names, forms and ties of parameters.

    grad: those that require grad are a kind apart from those that do not
    name: of the list; that of its stack, if there is one kind; else a kind's first layer gives its name
    """
    found: dict[Any, dict[str, nn.Module]] = {}
    for key, part in container.named_children():
        if form := [(*named, _form(param, grad)) for *named, param in _tied(dict(_all(part)))]:
            found.setdefault(tuple(sorted(form)), {})[f"{name}.{key}"] = part
    kinds = list(found.values())
    return {name: kinds[0]} if len(kinds) == 1 else {next(iter(parts)): parts for parts in kinds}


def _all(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters by every name that they have."""
    return module.named_parameters(remove_duplicate=False)


def _leaf(name: str, param: Tensor, files: ModuleFiles | None) -> Any:
    def load(_: int | None) -> Tensor:
        return param.detach().clone() if files is None else files.read(name)

    leaf = Lazy(tuple(param.shape), param.dtype, load, in_memory=files is None)
    return leaf if param.requires_grad else frozen(leaf)


def _unit(name: str, params: Mapping[str, Tensor], files: ModuleFiles | None) -> Any:
    """Returns a unit that stays one even if some of its leaves are frozen."""
    tree = {key: _leaf(join(name, key), param, files) for key, param in params.items()}
    return tree if all(param.requires_grad for param in params.values()) else Unit(tree)


def _container(module: nn.Module, layers: str, lists: Sequence[str]) -> nn.Module:
    """Returns the list of this name, one of `lists`."""
    known = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) and name
    ]
    if layers not in known:
        has = f"this module has {', '.join(known)}" if known else "this module has none"
        raise ValueError(f"functionalize: layers={layers!r} is no nn.ModuleList or nn.Sequential with layers; {has}")
    if around := [other for other in lists if layers.startswith(f"{other}.")] or lists.count(layers) > 1:
        what = "twice" if around is True else f"and {around[0]!r} around it"
        raise ValueError(f"functionalize: layers={list(lists)} has {layers!r} {what}; a layer belongs to one list")
    found = module.get_submodule(layers)
    if next(found.parameters(), None) is None:
        raise ValueError(f"functionalize: {layers} has no parameters")
    return found


def _beside(module: nn.Module, lists: Sequence[str], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields parameters that belong to modules around the layers, and the outermost modules beside the layers."""
    for key, param in module._parameters.items():
        if param is not None:
            yield join(name, key), param
    if name in lists:
        return
    for key, child in module.named_children():
        path = join(name, key)
        runs = type(child).forward is not nn.Module.forward  # a list of modules does not: each of them is called
        if not runs or any(f"{layers}.".startswith(f"{path}.") for layers in lists):
            yield from _beside(child, lists, path)
        elif any(True for _ in child.parameters()):
            yield path, child


def _stack(
    unit: str, parts: Mapping[str, nn.Module], owners: dict[int, str], files: ModuleFiles | None
) -> tuple[Stacked, dict[str, Place]]:
    """Returns the stack of layers of one kind, and (unit, leaf) of each parameter.

    owners: names of the parameters of all stacks, by id, to which it adds its own
    """
    layers, columns = list(parts), [dict(_all(part)) for part in parts.values()]
    first = columns[0]
    kept: dict[int, str] = {}
    for name, param in first.items():
        kept.setdefault(id(param), name)
    names = list(kept.values())
    for layer, column in zip(layers, columns, strict=True):
        for name in names:
            path = f"{layer}.{name}"
            if (other := owners.setdefault(id(column[name]), path)) != path:
                raise ValueError(
                    f"functionalize: {other} and {path} are one parameter, which a stack would untie; give each layer "
                    "its own"
                )

    def of_layer(name: str, layer: int) -> Tensor:
        return columns[layer][name].detach() if files is None else files.read(join(layers[layer], name))

    def load(name: str, layer: int | None) -> Tensor:
        if layer is None:
            return torch.stack([of_layer(name, number) for number in range(len(layers))])
        return of_layer(name, layer)

    def leaf(name: str) -> Any:
        param = first[name]
        made = Lazy((len(parts), *param.shape), param.dtype, partial(load, name), in_memory=True)
        return made if param.requires_grad else frozen(made)

    return Stacked({name: leaf(name) for name in names}), {name: (unit, kept[id(p)]) for name, p in first.items()}


def _tied(column: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields each parameter with its name, and the first name that it has."""
    first: dict[int, str] = {}
    for name, param in column.items():
        yield name, first.setdefault(id(param), name), param


def _form(param: Tensor, grad: bool) -> str:
    frozen = grad and not param.requires_grad
    return f"{param.dtype} {tuple(param.shape)}{', which does not require grad' if frozen else ''}"


def _refuse(module: nn.Module, files: ModuleFiles | None) -> None:
    """Raises TypeError for modules that a function of weights cannot imitate, and for values that are nowhere."""

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
    for name, buffer in module.named_buffers():
        if buffer.is_meta and (files is None or name not in files):
            no(name, "is a buffer on the meta device, and in no file: make the module with its parameters alone there")
    memory: dict[int, tuple[str, int]] = {}
    for name, param in _all(module):
        if type(param) is not nn.Parameter:
            no(name, f"is a {type(param).__name__}, not a plain nn.Parameter; give the module before it was changed")
        if param.is_meta and files is None:
            no(name, "is on the meta device and has no values; load the module first, or name its files (files=)")
        if not param.is_floating_point():
            no(name, f"is {param.dtype}; parameters are floating point")
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            no(name, "has hooks on its gradient, which goes elsewhere; remove them")
        other, owner = memory.setdefault(param.data_ptr(), (name, id(param)))
        if param.data_ptr() and owner != id(param):
            no(name, f"and {other} share memory but are two parameters; make them one, or clone one")
