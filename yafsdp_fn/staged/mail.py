"""Carry slots with what crosses between segments, and the work of `Send` and `Receive`.

    a segment's last compute    put      tensors -> carry slot         compute stream
    Send                        carry slot -> another stage            send stream
    Receive                     another stage -> carry slot            receive stream
    a segment's first compute   get      carry slot -> tensors         compute stream

What arrives is copied out of its slot, which is free at once: what a graph keeps lives as long as the graph.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from yafsdp_fn.comm.streams import Work
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.protocols import Works
from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.split import Parcel
from yafsdp_fn.schedules.text import describe_parcel
from yafsdp_fn.staged.crossing import Crossing


class Mail:
    """The carry slots of a slot set. number: of the set"""

    def __init__(self, crossing: Crossing, memory: Memory, number: object) -> None:
        self._memory: Memory = weakref.proxy(memory)  # as slots have it
        self._number, self.crossing = number, crossing
        self._slots: dict[int, Tensor] = {}

    def reserve(self, program: Program) -> None:
        """Makes every carry slot of `program` as large as what it holds."""
        sizes: dict[int, int] = {}
        for op in program.ops:
            for parcel, slot in program.trace.parcels_of(op):
                sizes[slot] = max(sizes.get(slot, 0), self.crossing.nbytes(parcel))
        for slot, size in sizes.items():
            if slot not in self._slots or self._slots[slot].numel() < size:
                self._slots[slot] = torch.empty(size, dtype=torch.uint8, device=self._memory.comms.device)
                self._memory.made([("carry slot", self._number, slot)])
                self._memory.comms.keep(self._slots[slot])

    def put(self, parcels: Iterable[tuple[Parcel, int]], tensors: Sequence[Sequence[Tensor | None]]) -> None:
        """Into the slot of each parcel its tensors; None: zeros, a gradient that nothing asked for."""
        for (parcel, slot), values in zip(parcels, tensors, strict=True):
            for piece, value in zip(self.crossing.pieces(parcel), values, strict=True):
                view = piece.of(self._slots[slot])
                view.zero_() if value is None else view.copy_(value)

    def get(self, parcels: Iterable[tuple[Parcel, int]]) -> list[list[Tensor]]:
        """Copies of the tensors in the slot of each parcel."""
        return [[p.of(self._slots[slot]).clone() for p in self.crossing.pieces(parcel)] for parcel, slot in parcels]

    def works(self) -> Works:
        return {Send: self._send, Receive: self._receive}

    def named(self, op: Send | Receive) -> str:
        """What travels, and to whom or from whom."""
        way = "to" if isinstance(op, Send) else "from"
        return f"{describe_parcel(op.parcel, self.crossing.trace)} {way} stage {self._other(op)}"

    def _send(self, op: Send) -> Work:
        return self._memory.comms.send(self._bytes(op), self._other(op))

    def _receive(self, op: Receive) -> Work:
        return self._memory.comms.receive(self._bytes(op), self._other(op))

    def _other(self, op: Send | Receive) -> int:
        return self.crossing.split.ends(op.flow, op.back)[isinstance(op, Send)]

    def _bytes(self, op: Send | Receive) -> Tensor:
        return self._slots[op.carry_slot][: self.crossing.nbytes(op.parcel)]
