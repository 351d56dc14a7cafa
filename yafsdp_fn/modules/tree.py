"""The parameters of a torch module as a tree of units, and the module without its weights."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from yafsdp_fn.modules.files import ModuleValues
from yafsdp_fn.params.markers import Stacked, Unit, frozen, has_marker
from yafsdp_fn.params.sources import Lazy
from yafsdp_fn.params.tree import join
from yafsdp_fn.util.bits import sum_of_bits
from yafsdp_fn.util.torch_private import memory_key

# ---- A module without its weights, and copies of it for one call, which `functionalize` runs.
#
#     skeleton = without_weights(module)          # its structure, with an `Absent` in place of each parameter
#     with copied(skeleton, "", weights) as made: # for one call: other weights, perhaps other forwards, all else shared
#         out = made(*args)                       # at the end: what it wrote to itself, lost with the copy, is refused
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

OF_HOOKS = "_output_capturing_hooks_installed"
"""The mark that transformers leaves on a model whose parts its forward gave hooks; those of a copy end with it."""

OWN = {"_parameters", "_buffers", "_modules", "forward", "_flat_weights", "_flat_weight_refs", OF_HOOKS, *HOOKS}
"""The attributes that a copy has of its own; nn.LSTM and the like list their weights a second time."""


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
            "itself, reads the weight from outside, or holds it by a reference that is no submodule or parameter (a "
            "method in an attribute, self.run = self.fast, is of the first module: take getattr(self, 'fast'))"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self._name!r})"


def without_weights(module: nn.Module, values: ModuleValues) -> nn.Module:
    """Returns a deep copy of `module` without its parameters, with the buffers of its files."""
    memo: dict[int, Any] = {}
    for name, param in _all(module):
        memo.setdefault(id(param), Absent.of(param, name, param.device, param.dtype))
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        what = f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}"
        raise TypeError(f"functionalize: {what}; take out what cannot, such as process groups and files") from error
    for path, part in made.named_modules():
        for key in part._buffers:
            name = join(path, key)
            if name in values:
                part._buffers[key] = values.read(name)
    return made


def placed(
    skeleton: nn.Module, device: torch.device, dtype: torch.dtype, own: Mapping[str, torch.dtype | None]
) -> nn.Module:
    """Returns a skeleton for weights of `dtype`, or of their own, on `device`, with its buffers there."""
    made = _copy(skeleton, {})
    for path, part in made.named_modules():
        parameters: dict[str, Any] = part._parameters
        for key, param in parameters.items():
            if param is not None:
                name = join(path, key)
                parameters[key] = Absent.of(param, name, device, own.get(name) or dtype)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = buffer.to(device)
    return made


@contextmanager
def copied(module: nn.Module, name: str, weights: Mapping[str, Any], *, may_note: bool = False) -> Iterator[nn.Module]:
    """Makes a shallow copy of `module` and of all modules below it for one call; buffers and settings are shared.

    Raises RuntimeError at the end if a buffer or an attribute was written, which would be lost, or differ between
    ranks. name: of `module`, for this; weights: replace its parameters, by name; may_note: attributes may be written
    that hold no number and no tensor yet
    """
    copies: dict[nn.Module, nn.Module] = {}
    made = _copy(module, copies)
    before = {part: _buffers(part) for part in copies}
    for path, weight in weights.items():
        owner, _, key = path.rpartition(".")
        made.get_submodule(owner)._parameters[key] = weight
    yield made
    for part, buffers in before.items():
        written = {key for key, *_ in buffers ^ _buffers(copies[part])}
        old = vars(part)
        for key, now in vars(copies[part]).items():
            if key in OWN:
                continue
            # A list or dict is the skeleton's own. Tensors in it have no graph where the visit recomputes, and their
            # gradient would be lost in silence. Numbers that are logged there do no harm.
            changed = now is not old.get(key) and (not may_note or _counts_on(old.get(key), now))
            if changed or (type(now) in (list, dict) and not may_note and _has_graph(now)):
                written.add(key)
        if written:
            path = next(path for path, other in module.named_modules() if other is part)
            raise writes(join(name, path), ", ".join(sorted(written)))


def writes(module: str, what: str) -> RuntimeError:
    """Returns the error for a module that keeps something for its next call."""
    return RuntimeError(
        f"{module or 'the module'} writes to its {what} while it runs. A "
        "function keeps nothing: a recomputation would write again, and ranks differ. Return it instead, or "
        "switch it off (running statistics, power iterations, positions that grow). What each call makes anew "
        "may be None before"
    )


def tensors_beside(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that a module has beside its parameters, by name: buffers, and attributes, in lists too."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        keys, leaves, _ = optree.tree_flatten_with_path(vars(part))
        for key, leaf in zip(keys, leaves, strict=True):
            if type(leaf) is Tensor and leaf.layout == torch.strided:
                first, *inside = [str(step) for step in key if step != "_buffers"]
                found[join(path, first) + "".join(f"[{step}]" for step in inside)] = leaf
    return found


def bits_of(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Returns a digest of each plain tensor, which a write through `.data` changes, too."""
    return {name: int(sum_of_bits(value.detach())) for name, value in tensors.items() if type(value) is Tensor}


def _has_graph(kept: list[Any] | dict[Any, Any]) -> bool:
    """Returns whether a list or dict has a tensor that would need its gradient, left there by a forward."""
    found = kept.values() if isinstance(kept, dict) else kept
    return any(isinstance(one, Tensor) and one.requires_grad for one in found)


def _counts_on(had: Any, now: Any) -> bool:
    """Returns whether a call may have made what an attribute has `now` of what it `had`, which the next call lacks."""
    return isinstance(had, Tensor) or (isinstance(had, int | float | complex) and had != now)


def _copy(part: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    # not nested in `copied`: a recursive closure would hold the weights until the garbage collector runs
    if part not in copies:
        copies[part] = made = object.__new__(type(part))
        own = vars(made)
        own.update(vars(part))
        own.update({hooks: OrderedDict() for hooks in HOOKS})
        own["_parameters"] = dict(part._parameters)
        own["_buffers"] = dict(part._buffers)
        own["_modules"] = {key: None if sub is None else _copy(sub, copies) for key, sub in part._modules.items()}
    return copies[part]


def _buffers(part: nn.Module) -> set[tuple[str, int, int]]:
    """Returns the names of a module's buffers, each with what tells another tensor, or a write to it."""
    return {
        (key, id(buffer), 0 if buffer is None or buffer.is_inference() else buffer._version)
        for key, buffer in part._buffers.items()
    }


def hooks_below(module: nn.Module) -> dict[str, dict[int, Callable[..., Any]]]:
    """Returns the hooks on the outputs of modules below `module`, by their names, those that take keywords aside."""
    found: dict[str, dict[int, Callable[..., Any]]] = {}
    for path, part in module.named_modules():
        hooks = {key: hook for key, hook in part._forward_hooks.items() if key not in part._forward_hooks_with_kwargs}
        if path and hooks:
            found[path] = hooks
    return found


def refuse_hooks(module: nn.Module, name: str, called: Collection[int]) -> None:
    """Raises RuntimeError if a module below a visited one got a hook that was not called: before its forward, in the
    backward, with keywords, or after the visit."""
    for path, part in module.named_modules():
        if path and hooked(part, called):
            raise RuntimeError(
                f"{join(name, path)} was given a hook while the model ran, which cannot be called inside of a visit; "
                "hooks on outputs, (module, args, output), are called behind it, if they are there before it"
            )


def hooked(module: nn.Module, but: Collection[int] = ()) -> bool:
    return any(key not in but for hooks in HOOKS[:4] for key in vars(module).get(hooks, ()))


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

Computes = Mapping[str, torch.dtype | None]
"""Dtypes by the names of parameters, in which `*` stands for anything; None: `Precision.compute`."""

OwnDtypes = Mapping[nn.Parameter, torch.dtype | None]
"""The dtypes of parameters that have one of their own; None: `Precision.compute` after all."""

KEPT_IN_FLOAT32 = "_keep_in_fp32_modules_strict"
"""The attribute in which classes of transformers list what stays in float32 where the rest is in bfloat16. The list
without "strict" is for float16 alone."""


class Places(NamedTuple):
    """The places of a module's parameters in its tree.

    stacks: the names of the layers of each stack, by unit
    visits: for each layer and each module beside the layers, by dotted name: the place of each parameter, by its name
        in it; for a parameter that belongs to a module around the layers, by its own name, its place by ""
    own: dtypes of parameters of their own, by name
    """

    stacks: Mapping[str, Sequence[str]]
    visits: Mapping[str, Mapping[str, Place]]
    own: Mapping[str, torch.dtype | None]


def tree_of(
    module: nn.Module, layers: Layers, values: ModuleValues, compute: Computes
) -> tuple[dict[str, Any], Places]:
    """Reads `module`, which has these values. Raises as `functionalize` does."""
    given: Any = [layers] if isinstance(layers, str) else layers
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        kind = type(layers).__name__
        raise TypeError(
            f"functionalize: layers: expected names of lists of layers, such as 'model.layers', got a {kind}"
        )
    lists: list[str] = list(given)
    if not lists:
        raise ValueError("functionalize: layers=[]: expected the name of a list of layers, or several")
    _refuse(module, values)
    own = _own_dtypes(module, compute)
    stacks: dict[str, list[str]] = {}
    for name in lists:
        stacks |= _kinds(_container(module, name, lists), name, own)
    parts: list[tuple[str, str, dict[str, nn.Parameter]]] = []
    for unit, names in stacks.items():
        parts += [(unit, name, dict(_all(module.get_submodule(name)))) for name in names]
    parts += [(name, name, named) for name, named in _beside(module, lists)]

    seen: dict[int, tuple[str, Place]] = {}  # by id of a parameter: its first name, and its place
    visits: dict[str, dict[str, Place]] = {}
    sources: dict[str, dict[str, list[str]]] = {}  # names of the parameters of a leaf: of each layer, in a stack
    for unit, part, named in parts:
        places = visits[part] = {}
        for key, param in named.items():
            name = join(part, key)
            first, places[key] = seen.setdefault(id(param), (name, (unit, key)))
            if first == name:
                sources.setdefault(unit, {}).setdefault(key, []).append(name)
            elif places[key][0] in stacks and not first.startswith(f"{part}."):
                pair = f"{first} and {name} are one parameter"
                raise ValueError(f"functionalize: {pair}, which a stack of layers would untie; give each its own")

    beside = {name: one for name, one in tensors_beside(module).items() if name not in values}
    params: dict[str, Any] = {}
    for unit, leaves in sources.items():
        tree = {key: _leaf(module, names, unit in stacks, values, own, beside) for key, names in leaves.items()}
        if unit in stacks:
            params[unit] = Stacked(tree)
        elif "" in tree:
            params[unit] = tree[""]
        else:  # one unit, even if some of its leaves are frozen
            params[unit] = Unit(tree) if has_marker(tree) else tree
    return params, Places(stacks, visits, {name: own[param] for name, param in _all(module) if param in own})


def _leaf(
    module: nn.Module,
    names: Sequence[str],
    in_stack: bool,
    values: ModuleValues,
    own: OwnDtypes,
    beside: Mapping[str, Tensor],
) -> Any:
    """Returns the leaf of a parameter, or of those of each layer."""
    like = module.get_parameter(names[0])
    shape = (len(names), *like.shape) if in_stack else tuple(like.shape)
    trained = like.requires_grad

    def load(layer: int | None) -> Tensor:
        if any(module.get_parameter(name).requires_grad != trained for name in names):
            raise ValueError(
                f"{names[0]}: requires_grad was {trained} when ya.functionalize read it, and is not any more. Set it "
                "before, or freeze a part of the tree, ya.frozen(params[...])"
            )
        if layer is None:
            return torch.stack([values.read(name) for name in names]).view(shape)
        return values.read(names[layer])

    leaf = Lazy(shape, like.dtype, load, in_memory=values.in_memory, compute=own.get(like), beside=beside)
    return leaf if trained else frozen(leaf)


def _own_dtypes(module: nn.Module, compute: Computes) -> OwnDtypes:
    """Returns the dtypes of their own in which parameters are gathered: float32 for those that transformers keeps in it
    beside bfloat16, and what `compute` says. Raises ValueError for a pattern of `compute` that fits none."""
    named = list(_all(module))
    patterns = [pattern for part in module.modules() for pattern in getattr(part, KEPT_IN_FLOAT32, None) or ()]
    found: dict[nn.Parameter, torch.dtype | None] = {}
    for pattern in patterns:
        kept = [param for name, param in named if fnmatchcase(name, f"*{pattern}*") and param.dtype != torch.float64]
        found |= dict.fromkeys(kept, torch.float32)
    for pattern, dtype in compute.items():
        chosen = [param for name, param in named if fnmatchcase(name, pattern)]
        if not chosen:
            raise ValueError(f"functionalize: compute: {pattern!r} fits no parameter; the first one is {named[0][0]}")
        found |= dict.fromkeys(chosen, dtype)
    return found


def _kinds(container: nn.Module, name: str, own: OwnDtypes) -> dict[str, list[str]]:
    """Returns the layers of a list that have parameters, by the name of their stack: that of the list if there is one
    kind; else a kind's first layer gives its name."""
    found: dict[Any, list[str]] = {}
    for key, layer in container.named_children():
        first: dict[int, str] = {}  # by id of a parameter: ties
        form: list[Any] = []
        for path, param in _all(layer):
            tie = first.setdefault(id(param), path)
            form.append((path, tie, param.shape, param.dtype, param.requires_grad, own.get(param)))
        if form:
            found.setdefault(frozenset(form), []).append(f"{name}.{key}")
    kinds = list(found.values())
    return {name: kinds[0]} if len(kinds) == 1 else {names[0]: names for names in kinds}


def _all(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters by every name that they have."""
    return module.named_parameters(remove_duplicate=False)


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
    around = [f"and {other!r} around it" for other in lists if layers.startswith(f"{other}.")]
    if around or lists.count(layers) > 1:
        what = "".join(around[:1]) or "twice"
        raise ValueError(f"functionalize: layers={list(lists)} has {layers!r} {what}; a layer belongs to one list")
    found = module.get_submodule(layers)
    if next(found.parameters(), None) is None:
        raise ValueError(f"functionalize: {layers} has no parameters")
    return found


def _beside(module: nn.Module, lists: Sequence[str], name: str = "") -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Yields parameters outside the layers, by unit: each parameter of a module that contains layers is one unit, each
    outermost module without layers is another."""
    for key, param in module._parameters.items():
        if param is not None:
            yield join(name, key), {"": param}
    if name in lists:
        return
    for key, child in module.named_children():
        path = join(name, key)
        runs = type(child).forward is not nn.Module.forward  # a list of modules does not: each of them is called
        if not runs or any(f"{layers}.".startswith(f"{path}.") for layers in lists):
            yield from _beside(child, lists, path)
        elif named := dict(_all(child)):
            yield path, named


def _refuse(module: nn.Module, values: ModuleValues) -> None:
    """Raises TypeError for modules that a function of weights cannot imitate, and for values that are nowhere."""

    def no(name: str, why: str) -> None:
        raise TypeError(f"functionalize: {name or 'the module'} {why}")

    for name, param in _all(module):
        if type(param) is not nn.Parameter:
            what = f"is a {type(param).__name__}, not a plain nn.Parameter"
            no(name, f"{what}; give the module before it was changed, or a lazy one after its first call")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod"):
            no(name, "is compiled; give the module that it was made of")
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            no(name, f"is a {type(part).__name__}; give the module inside, its .module")
        if hooked(part):
            why = "has hooks, which would run inside of visits and again when they are recomputed"
            of_others = "weight_norm: take torch.nn.utils.parametrizations; transformers' gradient checkpointing, even "
            no(name, f"{why}; remove them ({of_others}once it is off: module.disable_input_require_grads())")
        if "forward" in vars(part):
            no(name, "has another forward than its class, set on the instance (accelerate does so); remove that")
        if getattr(part, "gradient_checkpointing", False):
            no(name, "has gradient checkpointing on; turn it off: a schedule says what is recomputed (remat=)")
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            no(name, "keeps running statistics, which differ between ranks; use .eval(), or another norm")
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            no(name, "normalises by the rows of one rank and microbatch (track_running_stats=False); use another norm")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq:
            no(name, "divides gradients by the counts of one rank and microbatch; leave scale_grad_by_freq out")
    # the skeleton has copies of these tensors, which no update of the weight reaches
    trained = {memory_key(param): name for name, param in reversed([*_all(module)]) if param.requires_grad}
    for name, value in tensors_beside(module).items():
        if value.is_meta and name not in values:
            no(name, "is a buffer on the meta device, and in no file: make the module with its parameters alone there")
        if (weight := trained.get(memory_key(value))) is not None:
            no(name, f"is a view of {weight}, and would keep its value of now; take the weight in the forward")
    memory: dict[int, tuple[str, int]] = {}
    for name, param in _all(module):
        if param.is_meta and values.in_memory:
            no(name, "is on the meta device and has no values; load the module first, or name its files (files=)")
        if not param.is_floating_point():
            no(name, f"is {param.dtype}; parameters are floating point")
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            no(name, "has hooks on its gradient, which goes elsewhere; remove them")
        other, owner = memory.setdefault(param.data_ptr(), (name, id(param)))
        if param.data_ptr() and owner != id(param):
            no(name, f"and {other} share memory but are two parameters; make them one, or clone one")
