"""Finds tensors that reach a block from outside: neither an argument, nor a weight, nor made inside.

Such a tensor would receive no gradient, silently, so it is an error. Walking the block's local graph to its leaves
sees it on the fast path; under torch.func the graph hides behind wrappers, and a function mode looks at each call.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yafsdp_fn.torch_private import is_transform_wrapper

HOW = "pass it as an argument, in xs, or in consts; or detach it if it needs no gradient"


def check_graph(
    outs: Sequence[Tensor], allowed: Iterable[Tensor], name: str, again: Callable[[], Sequence[Tensor]]
) -> None:
    """Raises where the graph of `outs` ends in a leaf that is neither in `allowed` nor made by the block itself.

    again: runs the block once more: where a leaf is unknown, a mode looks whether it is made inside, as forces are
    """
    allowed = list(allowed)
    if _foreign_leaf(outs, allowed, name) is None:
        return
    watch = Watch(allowed, name)
    with watch:
        outs = again()
    if (leaf := _foreign_leaf(outs, watch.known(), name)) is not None:
        raise RuntimeError(_message(name, _shown(leaf)))


def _foreign_leaf(outs: Iterable[Tensor], allowed: Iterable[Tensor], name: str) -> Tensor | None:
    """A leaf that the graph of `outs` ends in and that is not in `allowed`, if there is one."""
    known = {id(tensor) for tensor in allowed}
    seen: set[Any] = set()
    todo: list[Any] = [out.grad_fn for out in outs if out.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        running = getattr(node, "running", None)  # the autograd node of a visit: the graph around this block
        if running is not None:
            raise RuntimeError(_message(name, f"the output of an earlier visit ({running.visit.name})"))
        todo += [below for below, _ in node.next_functions if below is not None]
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
    return None


class Watch(TorchFunctionMode):
    """Raises where a block uses a tensor that requires grad and is not known."""

    def __init__(self, allowed: Iterable[Tensor], name: str) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in allowed}  # keeps them alive: ids must not be reused
        self._name = name

    def known(self) -> list[Tensor]:
        """What was allowed, and all that was made since."""
        return list(self._known.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = [args, kwargs or {}]
        for leaf in optree.tree_leaves(given):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known and _tracked(leaf):
                raise RuntimeError(_message(self._name, _shown(leaf)))
        out = func(*args, **(kwargs or {}))
        for leaf in optree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._known[id(leaf)] = leaf
        return out


def _tracked(tensor: Tensor) -> bool:
    return tensor.requires_grad or is_transform_wrapper(tensor)


def _shown(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} that requires grad"


def _message(name: str, what: str) -> str:
    return f"{name}: {what} reaches the block from outside, where no gradient would come back to it: {HOW}"
