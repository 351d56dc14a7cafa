"""Slots: preallocated flat buffers into which weights are gathered, and from which gradients are reduced.

weight slot s   holds unit u:  view [padded numel of u] in u's gather dtype; what arrives in a wire format lies at its
                               end, and is decoded from the front, or stays as it is (`ya.formats.Float8`)
gradient slot s holds unit u:  view [padded numel of u] in u's reduce dtype
secondary shard of unit u:     [padded numel / local ranks], for gathers inside the node

A slot is raw bytes, as large as its largest unit. If one rank has all of a unit, its shard is the whole vector: slots
alias the shard, and nothing is copied.
"""

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.nn import linear
from yafsdp_fn.nn.float8 import NUMBERS, Numbers, stand_in
from yafsdp_fn.nn.linear import DESTINATION, Destination, Scratch
from yafsdp_fn.program.ops import Buffer, Op
from yafsdp_fn.program.program import Program
from yafsdp_fn.runtime.memory import StateMemory, address_of
from yafsdp_fn.runtime.shards import Shards, UnitViews, views_of
from yafsdp_fn.runtime.works import PreparedOp

Views = dict[tuple[int, int], UnitViews]
"""Views of a unit in a slot, by (slot, unit)."""


ALONE = next(map(sys.getrefcount, [object()]))
"""References to what a list alone holds, as they are counted there."""


# ---- The buffers.


class Slots:
    """The slots of one session, which takes them from its memory and gives them back.

    number: names the set on the scoreboard; reserved: the program that they are large enough for
    prepared: what is known of its ops here, until a slot moves; by kind and op, since ops are tuples: a stash and a
        reduction of the same numbers are equal
    carried: weight slot -> the unit that it is to hold when the program begins
    contents: weight slot -> unit, version of its weights; storages: addresses of the memory that blocks see as weights
    grad_views, made_leaves: what `grad` and `leaves` have made, by their arguments
    activations: the content of carry slots, if the program has any (protocols.py)
    """

    def __init__(self, memory: StateMemory) -> None:
        self.memory: StateMemory = weakref.proxy(memory)  # which keeps its idle slots: a dropped state must not linger
        self.number = object()
        # for the program that it is reserved for
        self.reserved: Program | None = None
        self.prepared: dict[tuple[type[Op], Op], PreparedOp] = {}
        self.carried: dict[int, int] = {}
        self.activations: Any = None
        self.contents: dict[int, tuple[int, int]] = {}
        # memory
        rows = memory.working.rows
        self._shards = self.storages = {address_of(rows[unit]) for unit in rows.keys() & memory.weights_alias}
        self._secondary: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        # made when they are asked for
        self._views: Views = {}
        self.grad_views: Views = {}
        self.made_leaves: dict[tuple[int, int, bool], list[Tensor]] = {}

    # ---- memory

    def reserve_for(self, program: Program) -> None:
        """Makes every slot of `program` as large as what it holds."""
        alias = self.memory.weights_alias
        self.reserve(program.slot_bytes(alias), program.grad_slot_bytes(self.memory.grads_alias))
        for unit, size in program.secondary_bytes().items():
            if unit not in self._secondary and unit not in alias:
                self._secondary[unit] = self._new(("secondary", self.number, unit), size)
        self.carried = program.carried()
        self.reserved = program
        self.prepared.clear()

    def reserve(self, weights: Mapping[int, int], grads: Mapping[int, int]) -> None:
        """Makes every slot at least that many bytes large."""
        self._grow("slot", self._weights, weights)
        self._grow("grad slot", self._grads, grads)
        self.storages = self._shards | set(map(address_of, self._weights.values()))

    def _grow(self, kind: str, buffers: dict[int, Tensor], sizes: Mapping[int, int]) -> None:
        small: list[int] = []
        for slot, size in sizes.items():
            if slot not in buffers or buffers[slot].numel() < size:
                small.append(slot)
        if not small:
            return
        if not buffers.keys().isdisjoint(small):
            self.memory.comms.drain()  # a stream may still use a smaller buffer
        # what was made of smaller buffers keeps them alive; the rest is made again at its next use
        for made in (self.prepared, self._views, self.grad_views, self.made_leaves):
            made.clear()
        for slot in small:
            buffers[slot] = self._new((kind, self.number, slot), sizes[slot])
            if kind == "slot":
                self.contents.pop(slot, None)

    def _new(self, name: Buffer, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.memory.comms.device)
        # the memory may have had another owner, whose kernels still run on the compute stream
        self.memory.made([name])
        # a state may be dropped while it gathers for its next step
        self.memory.comms.mark_used(buffer)
        return buffer

    def secondary(self, unit: int) -> Tensor:
        """Returns the secondary shard of `unit`, in the dtype of its slots."""
        return self._secondary[unit].view(self.memory.slot_dtype(unit))

    # ---- views of a unit

    def weight(self, slot: int, unit: int) -> UnitViews:
        """Returns views of `unit` in weight slot `slot`, or in its shard if they alias."""
        memory = self.memory
        if unit in memory.weights_alias:
            return memory.working.views(unit)
        found = self._views.get((slot, unit))
        if found is None:
            whole = self._weights[slot][: memory.units[unit].gather_bytes]
            found = self._views[slot, unit] = views_of(memory.layout_of(unit), whole.view(memory.slot_dtype(unit)))
        return found

    def grad(self, slot: int, unit: int, shards: Shards | None) -> UnitViews:
        """Returns views of the gradient of `unit` in gradient slot `slot`, or in its shard if they alias."""
        memory = self.memory
        if unit in memory.grads_alias:
            assert shards is not None
            return shards.views(unit)
        found = self.grad_views.get((slot, unit))
        if found is None:
            whole = self._grads[slot][: memory.units[unit].reduce_bytes]
            found = self.grad_views[slot, unit] = views_of(memory.layout_of(unit), whole.view(memory.wire_dtype(unit)))
        return found

    def encoded(self, slot: int, unit: int) -> Tensor:
        """Returns the bytes of `unit` in weight slot `slot`, as they arrive in its wire format."""
        spec = self.memory.units[unit]
        return self._weights[slot][spec.gather_bytes - spec.gather_wire : spec.gather_bytes]

    # ---- leaves that a block gets

    def leaves(self, slot: int, unit: int, track: bool) -> list[Tensor]:
        """Returns a block's leaves of `unit` in weight slot `slot`; track: under autograd, with their destinations."""
        found = self.made_leaves.get((slot, unit, track))
        if found is not None:
            # what a block did to its weights, a hook, `requires_grad_` or an attribute, is for that visit alone; so is
            # what it has cached for one: who holds a leaf may know it by it
            references = list(map(sys.getrefcount, found))
            for leaf, count in zip(found, references, strict=True):
                own = vars(leaf)
                held = count > ALONE or weakref.getweakrefcount(leaf)
                if held or leaf._backward_hooks or leaf.requires_grad != track or len(own) > (DESTINATION in own):
                    found = None
                    break
        if found is None:
            memory = self.memory  # a weak proxy; a bound method would be a cycle

            def scratch(shape: torch.Size, dtype: torch.dtype) -> Tensor:
                return memory.scratch(shape, dtype)

            found = []
            for view in self.weight(slot, unit).leaves:
                if memory.keeps(unit):
                    found.append(kept_leaf(view, memory.gather_dtype(unit), scratch).requires_grad_(track))
                else:
                    found.append(weight_leaf(view, scratch if track else None))
            self.made_leaves[slot, unit, track] = found
        return found


def weight_leaf(view: Tensor, scratch: Scratch | None) -> Tensor:
    """Returns a block's leaf of a weight; with `scratch` it requires grad, and has a destination if it is large.

    `.data`, not `detach`: the view needs a version counter of its own, since slots are overwritten by design
    """
    leaf = view.data
    if scratch is not None:
        leaf.requires_grad_()
        if leaf.numel() >= linear.LARGE:
            setattr(leaf, DESTINATION, Destination(scratch))
    return leaf


def kept_leaf(view: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Returns a block's leaf of a weight whose bytes are kept: without values, with a destination that has them."""
    leaf = stand_in(view, dtype)
    setattr(leaf, DESTINATION, Numbers(view.view(NUMBERS), scratch))
    return leaf
