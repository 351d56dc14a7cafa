"""Captures on the fake device, as of a user's CUDA graph: they run nothing, and some calls of others end them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from tests.harness.fake_cuda.tensors import DEVICE, address


class Tape:
    """What a capture has overwritten, to be undone.

    mode: in which it is captured; ended: what another thread has asked of the device meanwhile, which ended the capture
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.ended = mode, ""
        self._own: set[int] = set()  # memory that was made in it
        self._given: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """`func` is about to run: what it overwrites is kept for `undo`."""
        given = _tensors((args, kwargs))
        for x in given:
            if func._schema.is_mutable and address(x) not in self._own | self._before.keys():
                self._before[address(x)] = x.untyped_storage(), x.untyped_storage().clone()
        self._given = set(map(address, given))

    def made(self, outs: list[Tensor]) -> None:
        self._own.update(address(x) for x in outs if x.numel() and address(x) not in self._given)

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}


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


@contextlib.contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """As torch has it: the device is waited for, and cached memory given back, before the capture."""
    DEVICE.waits("torch.cuda.graph")
    into.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        into.capture_end()
