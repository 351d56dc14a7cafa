"""What the operations of this thread are, and the memory that they take anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """ops: the names of operations; fresh: bytes of each output whose storage is not that of an input"""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.fresh: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self.ops.append(func.name())
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.fresh.append(storage.nbytes())
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
