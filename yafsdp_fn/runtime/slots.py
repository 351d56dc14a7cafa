"""Slots: preallocated flat buffers that weights are gathered into and gradients are reduced from.

    weight slot s   holds unit u:  view [padded numel of u] in u's gather dtype
    gradient slot s holds unit u:  view [padded numel of u] in the reduce dtype

A slot is raw bytes, as large as the largest unit that is ever in it. At world size 1 a shard is the whole vector:
slots alias the shards, and nothing is copied.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from yafsdp_fn.runtime.shards import Shards
    from yafsdp_fn.runtime.store import Store
    from yafsdp_fn.schedules.program import Program

Views = dict[tuple[int, int], tuple[Tensor, list[Tensor]]]
"""(slot, unit) -> flat view, leaf views"""

_numbers = itertools.count()  # names slot sets apart on a scoreboard; carries no state


class Slots:
    """The slots of one session, taken from the store's pool and given back to it."""

    def __init__(self, store: Store) -> None:
        self.store = weakref.proxy(store)  # the store keeps its free slots: no cycle, or a dropped state would linger
        self.number = next(_numbers)
        self._reserved: Program | None = None
        self._storages: set[int] | None = None
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._views: Views = {}
        self._grad_views: Views = {}

    def reserve_for(self, program: Program) -> None:
        """Makes every slot of `program` as large as what it holds."""
        if self._reserved is not program:
            self.reserve(program.slot_bytes(), program.grad_slot_bytes())
            self._reserved = program

    def reserve(self, weights: Mapping[int, int], grads: Mapping[int, int]) -> None:
        """Makes every slot at least so many bytes large."""
        if self.store.comms.ranks > 1:
            self._reserve("slot", self._weights, self._views, weights)
        if not self.store.grads_alias:
            self._reserve("grad slot", self._grads, self._grad_views, grads)

    def _reserve(self, kind: str, buffers: dict[int, Tensor], views: Views, sizes: Mapping[int, int]) -> None:
        for slot, size in sizes.items():
            if slot not in buffers or buffers[slot].numel() < size:
                if slot in buffers:
                    self.store.comms.drain()  # a stream may still use the smaller buffer
                buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self.store.comms.device)
                self._storages = None
                # the memory may have had another owner, whose kernels still run on the compute stream
                self.store.made([(kind, self.number, slot)])
                for key in [key for key in views if key[0] == slot]:
                    del views[key]

    def weight(self, slot: int, unit: int) -> tuple[Tensor, list[Tensor]]:
        """`(flat, leaves)`: views of `unit` in weight slot `slot`."""
        if self.store.comms.ranks == 1:
            working = self.store.working
            return working.rows[unit], working.leaves(unit)
        found = self._views.get((slot, unit))
        if found is None:
            store = self.store
            flat = self._flat(self._weights[slot], store.units[unit].gather_bytes, store.gather_dtype(unit))
            found = self._views[slot, unit] = (flat, store.layout_of(unit).split(flat))
        return found

    def grad(self, slot: int, unit: int, shards: Shards) -> tuple[Tensor, list[Tensor]]:
        """`(flat, leaves)`: views of the gradient of `unit` in gradient slot `slot`, or its shard where they alias."""
        if self.store.grads_alias:
            return shards.rows[unit], shards.leaves(unit)
        found = self._grad_views.get((slot, unit))
        if found is None:
            store = self.store
            flat = self._flat(self._grads[slot], store.units[unit].reduce_bytes, store.precision.reduce_dtype)
            found = self._grad_views[slot, unit] = (flat, store.layout_of(unit).split(flat))
        return found

    def storages(self) -> set[int]:
        """Addresses of the memory that blocks see as weights (at world size 1, the working copies)."""
        if self._storages is None:
            buffers = self._weights.values() if self.store.comms.ranks > 1 else self.store.working.present()
            self._storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        return self._storages

    def nbytes(self) -> int:
        """Bytes allocated for slots."""
        return sum(buffer.numel() for buffer in (*self._weights.values(), *self._grads.values()))

    @staticmethod
    def _flat(buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return buffer[:size].view(dtype)
