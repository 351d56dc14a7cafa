"""What recomputed visits save, on its way to the host and back: carry slots, and a buffer of each visit on the host.

    forward     save      carry -> carry slot         compute stream
    Offload     to_host   carry slot -> host          offload stream
    Fetch       to_device host -> carry slot          offload stream
    backward    restore   views of the carry slot

The carry is copied into its slot, so that its own memory is free as soon as the loss lets go of it, in the order of the
compute stream, whatever the host is ahead of. Slots and buffers are made when a visit first needs them, and kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.comm.streams import Work
from yafsdp_fn.schedules.trace import in_carry_slot

if TYPE_CHECKING:
    from yafsdp_fn.runtime.store import Store


class Place(NamedTuple):
    """The memory of a tensor in a carry slot, in bytes, and how the tensor lies in it: in elements."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def movable(tensors: Sequence[Tensor], passed: Collection[int]) -> list[int]:
    """Which of a visit's carries an offload copies: those that are all of their memory, which would else stay.

    passed: those that come out of the visit in the same memory: every visit would copy it again
    """
    return [
        number
        for number, tensor in enumerate(tensors)
        if number not in passed and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    ]


class Carries:
    """The carry slots of a slot set, and its buffers on the host.

    store: a weak proxy, as slots have; number: of the set
    """

    def __init__(self, store: Store, number: int) -> None:
        self._store, self._device, self._number = store, store.comms.device, number
        self._slots: dict[int, Tensor] = {}
        self._host: dict[int, Tensor] = {}  # by visit
        self._places: dict[int, dict[int, Place]] = {}  # visit -> number of an argument -> where it is

    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carried: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies into `slot` what can be of the first `carried` of a visit's arguments; returns the others."""
        memory = {_address(out) for out in outs}
        passed = [k for k, x in enumerate(tensors[:carried]) if _address(x) in memory or not self._plain(x)]
        places: dict[int, Place] = {}
        end = 0
        for k in movable(tensors[:carried], passed):
            x = tensors[k]
            nbytes = x.untyped_storage().nbytes()
            places[k] = Place(end, nbytes, x.dtype, x.shape, x.stride(), int(x.storage_offset()))
            end += in_carry_slot(nbytes)
        self._reserve(slot, end)
        for k, place in places.items():
            # all bytes, in their order, so that what comes back has the same strides
            source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensors[k].untyped_storage())
            self._slots[slot][place.start : place.start + place.nbytes].copy_(source)
        self._places[visit] = places
        return [x for k, x in enumerate(tensors) if k not in places]

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """The visit's arguments: those that were saved, as views of `slot`, among the `others`."""
        places, rest = self._places[visit], iter(others)
        found = []
        for k in range(len(places) + len(others)):
            if k in places:
                place = places[k]
                first = place.start // place.dtype.itemsize + place.offset
                found.append(self._slots[slot].view(place.dtype).as_strided(place.shape, place.stride, first))
            else:
                found.append(next(rest))
        return found

    def to_host(self, visit: int, slot: int) -> Work:
        """The copy from `slot` to the buffer of `visit`, for the offload stream."""
        size = self._size(visit)
        if visit not in self._host or self._host[visit].numel() < size:
            self._host[visit] = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return _copy(self._host[visit][:size], self._slots[slot][:size])

    def to_device(self, visit: int, slot: int) -> Work:
        """The copy back, into `slot`."""
        size = self._size(visit)
        if self._reserve(slot, size):
            # the memory may have had another owner, whose kernels still run on the compute stream
            event = self._store.comms.compute_event()
            self._store.board.add(event, "compute", (), [("carry slot", self._number, slot)])
            event.complete()
        return _copy(self._slots[slot][:size], self._host[visit][:size])

    def nbytes(self) -> int:
        """Bytes allocated for carry slots."""
        return sum(slot.numel() for slot in self._slots.values())

    def host_nbytes(self) -> int:
        """Bytes allocated on the host."""
        return sum(buffer.numel() for buffer in self._host.values())

    def _plain(self, x: Tensor) -> bool:
        """Whether the memory of `x` is all that there is to it."""
        return type(x) is Tensor and x.device == self._device and not (x.is_conj() or x.is_neg())

    def _size(self, visit: int) -> int:
        return sum(in_carry_slot(place.nbytes) for place in self._places[visit].values())

    def _reserve(self, slot: int, size: int) -> bool:
        """Makes a carry slot large enough; returns whether its memory is new."""
        if slot in self._slots and self._slots[slot].numel() >= size:
            return False
        self._slots[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._store.comms.offload.keep(self._slots[slot])  # when a larger one takes its place, copies may be under way
        return True


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(to: Tensor, source: Tensor) -> Work:
    def work() -> None:
        to.copy_(source, non_blocking=True)

    return work
