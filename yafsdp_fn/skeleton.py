"""A module without its weights, and copies of it for one call: what `functionalize` runs.

    skeleton = without_weights(module)          # its structure; an `Absent` stands in the place of each parameter
    copies = copied(skeleton, weights=..)       # for one call: other weights, other forwards, the same all else
    out = copies[0].made(*args)
    refuse_writes(copies)                       # what a forward writes to itself would be lost with the copy

Nothing here is changed once it is made, so that threads may call at once, autograd's own among them.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor, nn

from yafsdp_fn.params.tree import join

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where a module keeps its hooks: the first four hold them, the others say how they are called."""

OWN = {"_parameters", "_buffers", "_modules", "forward", "_flat_weights", "_flat_weight_refs", *HOOKS}
"""What `copied` makes anew; an nn.LSTM and its like list their weights once more, and do so for new ones."""


class Absent(Tensor):
    """Shape, dtype and device of a weight that is not there; any computation with it raises, by its name."""

    _name: str

    @staticmethod
    def of(like: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> "Absent":
        """In the place of the parameter `like`, by its name."""
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


def without_weights(module: nn.Module) -> nn.Module:
    """A deep copy of `module` that has none of its parameters."""
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        memo.setdefault(id(param), Absent.of(param, name, param.device, param.dtype))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        what = f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}"
        raise TypeError(f"functionalize: {what}; take out what cannot, such as process groups and files") from error


class Copied(NamedTuple):
    """A module of a skeleton and its copy. name: the dotted one; versions: of its buffers, when it was copied"""

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
    """Shallow copies of `module`, the first of the list, and of all below it, that share buffers and settings.

    name: of `module`, for errors; weights: by name below `module`, in the place of its parameters; forwards: what is
        called in the place of a module's own, by its id
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
    # no function inside of `copied`: one that calls itself holds what it sees, weights too, until a collection
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
    """Raises where a call has changed a buffer, or an attribute, which would be lost, or differ between ranks."""
    for name, original, made, versions in copies:
        before, after = vars(original), vars(made)
        names = [] if buffers_only else [key for key in after if key not in OWN and after[key] is not before.get(key)]
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
    """Raises where a module inside of a visit got a hook, whose findings could not leave it with their gradient."""
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
