"""A CPU stand-in for CUDA graphs: a tape of operations on the memory that they had when they were recorded.

Like a graph it runs no Python when it is replayed, reads and writes fixed addresses, and recording it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """recorded: how many tapes there are; replayed: how often any was played"""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recorded, self.replayed = 0, 0

    def warm(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape:
            work()
        tape.undo()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._ops: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        self._own: set[int] = set()  # memory made while recording, which nothing else reads; held by `_ops`
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {address(tensor) for tensor in tensors((args, kwargs))}
        for tensor in tensors((args, kwargs)):
            if func._schema.is_mutable and address(tensor) not in self._own | self._before.keys():
                self._before[address(tensor)] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        out = func(*args, **kwargs)
        fresh = [(x, i) for i, x in enumerate(tensors(out)) if x.numel() and address(x) not in given]
        self._own.update(address(x) for x, _ in fresh)
        self._ops.append((func, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, fresh in self._ops:
                again = tensors(func(*args, **kwargs))
                for tensor, index in fresh:
                    tensor.copy_(again[index])
