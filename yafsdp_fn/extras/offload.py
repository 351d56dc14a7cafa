"""Offloads the saved arguments of recomputed visits: activation buffers, and a buffer of each visit on the host.

    forward     save         carry -> activation buffer      compute stream
    Offload     _to_host     activation buffer -> host       offload stream
    Fetch       _to_device   host -> activation buffer       offload stream
    backward    restore      views of the activation buffer

The carry is copied into its buffer, so that its own memory is free as soon as the loss drops it, in the order of the
compute stream, however far ahead the host is. Buffers are allocated when a visit first needs them, and kept.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.communication.streams import Work
from yafsdp_fn.program.ops import Fetch, Offload
from yafsdp_fn.program.split import in_carry_slot
from yafsdp_fn.runtime.memory import StateMemory, address_of
from yafsdp_fn.runtime.protocols import Works, movable


class CarrySlice(NamedTuple):
    """The memory of a tensor in an activation buffer, in bytes, and the tensor's layout in it, in elements."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostActivationBuffers:
    """The activation buffers of a slot set, and its buffers on the host.

    number: of the set
    """

    def __init__(self, memory: StateMemory, number: object) -> None:
        self._memory: StateMemory = weakref.proxy(memory)  # weak, as that of its slots
        self._device = memory.comms.device
        self._number = number
        self._stream = memory.comms.stream("offload")
        self._slots: dict[int, Tensor] = {}
        self._host: dict[int, Tensor] = {}  # by visit
        self._slices: dict[int, dict[int, CarrySlice]] = {}  # visit -> number of an argument -> where it is

    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carry_length: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies what it can of the first `carry_length` of a visit's arguments into `slot`; returns the others."""
        carry = tensors[:carry_length]
        of_outputs = set(map(address_of, outs))
        stays = [k for k, x in enumerate(carry) if address_of(x) in of_outputs or not self._plain(x)]
        slices: dict[int, CarrySlice] = {}
        end = 0
        for k in movable(carry, stays):
            x = tensors[k]
            nbytes = x.untyped_storage().nbytes()
            slices[k] = CarrySlice(end, nbytes, x.dtype, x.shape, x.stride(), int(x.storage_offset()))
            end += in_carry_slot(nbytes)
        self._reserve(slot, end)
        for k, each in slices.items():
            # all bytes, in their order, so that the restored tensor has the same strides
            source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensors[k].untyped_storage())
            self._slots[slot][each.start : each.start + each.nbytes].copy_(source)
        self._slices[visit] = slices
        return [x for k, x in enumerate(tensors) if k not in slices]

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """Returns the visit's arguments: the saved ones, as views of `slot`, among the `others`."""
        slices = self._slices[visit]
        rest = iter(others)
        found: list[Tensor] = []
        for k in range(len(slices) + len(others)):
            each = slices.get(k)
            if each is None:
                found.append(next(rest))
                continue
            first = each.start // each.dtype.itemsize + each.offset
            found.append(self._slots[slot].view(each.dtype).as_strided(each.shape, each.stride, first))
        return found

    def works(self) -> Works:
        return {Offload: self._to_host, Fetch: self._to_device}

    def _to_host(self, op: Offload) -> Work:
        """Returns the copy from the slot to the visit's host buffer."""
        visit, slot = op
        size = self._size(visit)
        if visit not in self._host or self._host[visit].numel() < size:
            self._host[visit] = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda"
            )
        return _copy(self._host[visit][:size], self._slots[slot][:size])

    def _to_device(self, op: Fetch) -> Work:
        """Returns the copy back into the slot."""
        visit, slot = op
        size = self._size(visit)
        if self._reserve(slot, size):
            # the memory may have had another owner, whose kernels still run on the compute stream
            self._memory.made([("carry slot", self._number, slot)])
        return _copy(self._slots[slot][:size], self._host[visit][:size])

    def _plain(self, x: Tensor) -> bool:
        """Returns whether the memory of `x` describes it completely."""
        return type(x) is Tensor and x.device == self._device and not (x.is_conj() or x.is_neg())

    def _size(self, visit: int) -> int:
        return sum(in_carry_slot(each.nbytes) for each in self._slices[visit].values())

    def _reserve(self, slot: int, size: int) -> bool:
        """Makes an activation buffer large enough; returns whether its memory is new."""
        if slot in self._slots and self._slots[slot].numel() >= size:
            return False
        self._slots[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._stream.mark_used(self._slots[slot])  # copies may be under way when a larger one replaces it
        return True


def _copy(to: Tensor, source: Tensor) -> Work:
    def work() -> None:
        to.copy_(source, non_blocking=True)

    return work
