"""Slots: preallocated flat buffers that weights are gathered into and gradients are reduced from.

    weight slot s   holds unit u:  view [padded numel of u] in u's gather dtype
    gradient slot s holds unit u:  view [padded numel of u] in the reduce dtype
    secondary shard of unit u:     [padded numel / local ranks], for gathers inside the node

A slot is raw bytes, as large as the largest unit that is ever in it. Where one rank is the shard group, a shard is
the whole vector: slots alias the shards, and nothing is copied.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yafsdp_fn.runtime.destination import weight_leaf
from yafsdp_fn.runtime.offload import Carries
from yafsdp_fn.schedules.scoreboard import Buffer

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
        self._carried: dict[int, int] = {}  # of the program it is reserved for
        self._contents: dict[int, tuple[int, int]] = {}  # weight slot -> unit, version of its weights
        self._secondary: dict[int, Tensor] = {}
        self._storages: set[int] | None = None
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._views: Views = {}
        self._leaves: dict[tuple[int, int, bool], list[Tensor]] = {}
        self._grad_views: Views = {}

    @cached_property
    def carries(self) -> Carries:
        """Carry slots, and what waits on the host."""
        return Carries(self.store, self.number)

    def reserve_for(self, program: Program) -> None:
        """Makes every slot of `program` as large as what it holds."""
        if self._reserved is not program:
            with self.store.comms.memory():
                self.reserve(program.slot_bytes(), program.grad_slot_bytes())
                if not self.store.weights_alias:
                    for unit, size in program.secondary_bytes().items():
                        if unit not in self._secondary:
                            self._secondary[unit] = self._new(("secondary", self.number, unit), size)
            self._carried = program.carried()
            self._reserved = program

    def missing(self) -> list[tuple[int, int]]:
        """`(unit, slot)` that the program reads first, and that this set does not hold, or not in this version."""
        versions = self.store.versions
        return [(u, slot) for slot, u in self._carried.items() if self._contents.get(slot) != (u, versions[u])]

    def gathered(self, units: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Takes note of a gather, when it is issued."""
        for unit, slot in zip(units, slots, strict=True):
            self._contents[slot] = (unit, self.store.versions[unit])

    def reserve(self, weights: Mapping[int, int], grads: Mapping[int, int]) -> None:
        """Makes every slot at least so many bytes large."""
        if not self.store.weights_alias:
            self._reserve("slot", self._weights, self._views, weights)
        if not self.store.grads_alias:
            self._reserve("grad slot", self._grads, self._grad_views, grads)

    def _reserve(self, kind: str, buffers: dict[int, Tensor], views: Views, sizes: Mapping[int, int]) -> None:
        for slot, size in sizes.items():
            if slot not in buffers or buffers[slot].numel() < size:
                if slot in buffers:
                    self.store.comms.drain()  # a stream may still use the smaller buffer
                buffers[slot] = self._new((kind, self.number, slot), size)
                self._storages = None
                if kind == "slot":
                    self._contents.pop(slot, None)
                for key in [key for key in views if key[0] == slot]:
                    del views[key]
                if kind == "slot":
                    self._leaves = {key: leaves for key, leaves in self._leaves.items() if key[0] != slot}

    def _new(self, name: Buffer, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.store.comms.device)
        # the memory may have had another owner, whose kernels still run on the compute stream
        self.store.made([name])
        # a state may be dropped while it gathers for its next step
        for stream in self.store.comms.streams:
            stream.keep(buffer)
        return buffer

    def secondary(self, unit: int) -> Tensor:
        """The secondary shard of `unit`, in its gather dtype."""
        return self._secondary[unit].view(self.store.gather_dtype(unit))

    def weight(self, slot: int, unit: int) -> tuple[Tensor, list[Tensor]]:
        """`(flat, leaves)`: views of `unit` in weight slot `slot`."""
        if self.store.weights_alias:
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

    def leaves(self, slot: int, unit: int, track: bool) -> list[Tensor]:
        """What a block sees of `unit` in weight slot `slot`; track: under autograd, with their destinations."""
        torch.clear_autocast_cache()  # it knows casts by their leaf, whose values have changed since the last step
        found = self._leaves.get((slot, unit, track))
        # what a block did to its weights, a hook or `requires_grad_`, is for that visit alone
        if found is None or any(leaf._backward_hooks or leaf.requires_grad != track for leaf in found):
            # a weak proxy; a bound method would be a cycle
            scratch = partial(_scratch_of, self.store) if track else None
            found = [weight_leaf(view, scratch) for view in self.weight(slot, unit)[1]]
            self._leaves[slot, unit, track] = found
        return found

    def storages(self) -> set[int]:
        """Addresses of the memory that blocks see as weights (where slots alias them, the working copies)."""
        if self._storages is None:
            buffers = self.store.working.present() if self.store.weights_alias else self._weights.values()
            self._storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        return self._storages

    def nbytes(self) -> int:
        """Bytes allocated for slots."""
        return sum(b.numel() for b in (*self._weights.values(), *self._grads.values(), *self._secondary.values()))

    @staticmethod
    def _flat(buffer: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return buffer[:size].view(dtype)


def _scratch_of(store: Store, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return store.scratch(shape, dtype)
