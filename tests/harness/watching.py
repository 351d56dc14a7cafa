"""What the operations of this thread are, and the memory that they take anew; what collectives carry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.communication.gloo import GlooGroup


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


class Collective(NamedTuple):
    """kind: "gather" or "reduce"; numel: of the whole vector; together: vectors of the same call"""

    kind: str
    numel: int
    dtype: torch.dtype
    group: Any
    together: int

    def sent(self) -> int:
        """Bytes that this rank sends."""
        ranks = self.group.process_group.size()
        return self.numel * self.dtype.itemsize // ranks * (ranks - 1)


@contextlib.contextmanager
def recorded() -> Iterator[list[Collective]]:
    """The vectors that collectives really carry, in order per kind; several may go together."""
    calls: list[Collective] = []

    def watched(name: str, kind: str) -> None:
        real = getattr(GlooGroup, name)

        def call(group: GlooGroup, outs: Any, ins: Any) -> None:
            pairs = [(outs, ins)] if isinstance(outs, Tensor) else [*zip(outs, ins, strict=True)]
            for out, given in pairs:
                assert out.dtype == given.dtype
                small, large = sorted((out.numel(), given.numel()))
                assert name == "all_to_all" or large == group.process_group.size() * small
                if out.dtype != torch.int64:  # those are agreements
                    calls.append(Collective(kind, large, out.dtype, group, len(pairs)))
            real(group, outs, ins)

        patch.setattr(GlooGroup, name, call)

    with pytest.MonkeyPatch.context() as patch:
        watched("all_gathers", "gather")
        watched("reduce_scatters", "reduce")
        watched("all_to_all", "reduce")
        yield calls
