"""Which visits have made what the loss has at hand: what has to travel where a step is cut into stages.

x = scan(...)          made by the last visit
y = x * 2 + table      the same: the table is made by none, and every stage has its own
"""

from collections.abc import Iterable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from yafsdp_fn.tracing.allocations import Lives

Made = frozenset[int]
"""Visits; none for what every stage can make for itself."""


class Beside(Lives):  # type: ignore[no-untyped-call]
    """What the loss does beside its visits: the memory that it takes, and where its results come from."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(known)
        self._made: Any = WeakIdKeyDictionary()  # memory -> visits: views and writes in place count alike
        self._numbers: Any = WeakIdKeyDictionary()  # tensor -> its number
        self._count = 0

    def made(self, tensor: Tensor) -> Made:
        """The visits whose outputs `tensor` was made of."""
        found: Made = self._made.get(tensor.untyped_storage(), frozenset())
        return found

    def number(self, tensor: Tensor) -> int:
        """Equal for the same tensor alone."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._count
            self._count += 1
        found: int = self._numbers[tensor]
        return found

    def comes_from(self, tensor: Tensor, made: Made) -> None:
        self._made[tensor.untyped_storage()] = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.paused:
            made = frozenset[int]().union(*[self.made(x) for x in _tensors((args, kwargs))])
            for x in _tensors(out) if made else ():
                self.comes_from(x, made | self.made(x))
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
