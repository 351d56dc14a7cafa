"""CUDA graphs on the fake device: operations on the addresses that they found at the capture, whoever owns them now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from tests.harness.fake_cuda.tensors import DEVICE, accesses, address


class Freed(RuntimeError):
    """A graph was replayed that uses memory which is gone."""


class External:
    """A tensor that a graph found there: known by its address, as a graph has it, whoever has got that since."""

    def __init__(self, host: Tensor) -> None:
        self._outline = host.dtype, tuple(host.shape), host.stride(), int(host.storage_offset())
        self._base = DEVICE.base(host)

    def found(self) -> Tensor:
        storage = DEVICE.owner(self._base)
        if storage is None:
            raise Freed("a graph uses memory that has been freed since its capture")
        dtype, shape, stride, offset = self._outline
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Tape:
    """Operations on memory as it was at the capture. What they made is the graph's own; the rest is not kept alive.

    mode: in which it is captured; ended: what another thread has asked of the device meanwhile, which ended the capture
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.ended = mode, ""
        self._ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """`func` is about to run: what it overwrites is kept for `undo`."""
        for x in _tensors((args, kwargs)):
            if func._schema.is_mutable and address(x) not in self._own | self._before.keys():
                self._before[address(x)] = x.untyped_storage(), x.untyped_storage().clone()
        apart: Any = optree.tree_map(
            lambda x: External(x) if isinstance(x, Tensor) and address(x) not in self._own else x, (args, kwargs)
        )
        given = {address(x) for x in _tensors((args, kwargs))}
        self._ops.append((func, *apart, []))
        self._given = given

    def made(self, outs: list[Tensor]) -> None:
        fresh = [x for x in outs if x.numel() and address(x) not in self._given]
        self._own.update(map(address, fresh))
        self._ops[-1][3].extend(outs)

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}
        # views of what is not its own would keep that alive
        self._ops = [
            (func, args, kwargs, [x if address(x) in self._own else None for x in outs])
            for func, args, kwargs, outs in self._ops
        ]

    def replay(self) -> None:
        DEVICE.look()
        with torch.no_grad():
            for func, args, kwargs, outs in self._ops:
                args, kwargs = optree.tree_map(lambda x: x.found() if isinstance(x, External) else x, (args, kwargs))
                again = _tensors(func(*args, **kwargs))
                for x, writes in accesses(func, args, kwargs):
                    DEVICE.uses(x, writes, f"replayed {func}")
                for x, new in zip(outs, again, strict=True):
                    if x is not None and x.data_ptr() != new.data_ptr():
                        x.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class CUDAGraph:
    tape: Tape

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.tape = DEVICE.tape = Tape(capture_error_mode)

    def capture_end(self) -> None:
        """Ends the capture. Where it has failed, nothing is left behind, as in torch 2.13."""
        DEVICE.tape = None
        self.tape.undo()
        if self.tape.ended:
            raise RuntimeError(f"operation failed due to a previous error during capture: {self.tape.ended}")

    def replay(self) -> None:
        self.tape.replay()


@contextlib.contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """As torch has it: the device is waited for, and cached memory given back, before the capture."""
    DEVICE.waits("torch.cuda.graph")
    into.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        into.capture_end()
