"""The rule `offload`: a carry that a visit saves is in one place at a time until its backward.

Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t
                         slot s  ------------------------------------->    Backward from slot s

A slot is written only when it is free, since what is lost cannot be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from yafsdp_fn.schedules.ops import Backward, Fetch, Forward, Offload
from yafsdp_fn.schedules.scoreboard import Buffer
from yafsdp_fn.schedules.trace import Compute, Trace

Refuse = Callable[[str, int, str, Buffer | None, int | None], NoReturn]
"""(rule, op, why, buffer, other op)"""


class Carry(NamedTuple):
    """What a visit has saved, and the op that put it where it is."""

    visit: int
    microbatch: int
    op: int


class Carries:
    """Where carries are, op by op."""

    def __init__(self, trace: Trace, refuse: Refuse) -> None:
        self._trace, self._refuse = trace, refuse
        self._slots: dict[int, Carry] = {}
        self._host: dict[int, Carry] = {}  # by visit
        self._saved: dict[tuple[int, int], int] = {}  # (visit, microbatch) -> the forward that saved a carry

    def forward(self, index: int, op: Forward, now: Compute) -> None:
        if op.carry_slot is not None:
            self._put(index, op.carry_slot, Carry(op.visit, now.microbatch, index))
            self._saved[op.visit, now.microbatch] = index

    def backward(self, index: int, op: Backward, now: Compute) -> None:
        saved = self._saved.pop((op.visit, now.microbatch), None)
        if op.carry_slot is None:
            if saved is not None:
                where = next(slot for slot in self._buffers(op.visit))
                self._refuse(
                    "offload", index, f"{self._name(op.visit)} has saved its carry in a carry slot", where, saved
                )
            return
        if saved is None:
            self._refuse("offload", index, f"the forward of {self._name(op.visit)} has saved no carry", None, None)
        self._take(index, op.visit, op.carry_slot)

    def offload(self, index: int, op: Offload) -> None:
        self._host[op.visit] = self._take(index, op.visit, op.carry_slot)._replace(op=index)

    def fetch(self, index: int, op: Fetch) -> None:
        carry = self._host.pop(op.visit, None)
        if carry is None:
            why = f"nothing that {self._name(op.visit)} has saved is on the host"
            self._refuse("offload", index, why, ("host", 0, op.visit), None)
        self._put(index, op.carry_slot, carry._replace(op=index))

    def end(self) -> None:
        for (visit, _), op in self._saved.items():
            where = next(buffer for buffer in self._buffers(visit))
            self._refuse("offload", -1, f"no backward reads what {self._name(visit)} has saved", where, op)

    def _put(self, index: int, slot: int, carry: Carry) -> None:
        held = self._slots.setdefault(slot, carry)
        if held is not carry:
            why = f"carry slot {slot} still holds what {self._name(held.visit)} has saved"
            self._refuse("offload", index, why, ("carry slot", 0, slot), held.op)

    def _take(self, index: int, visit: int, slot: int) -> Carry:
        held = self._slots.pop(slot, None)
        if held is None or held.visit != visit:
            there = "nothing" if held is None else f"what {self._name(held.visit)} has saved"
            why = f"carry slot {slot} holds {there}, it must hold what {self._name(visit)} has saved"
            self._refuse("offload", index, why, ("carry slot", 0, slot), None if held is None else held.op)
        return held

    def _buffers(self, visit: int) -> list[Buffer]:
        """Where the carry of `visit` is."""
        slots: list[Buffer] = [("carry slot", 0, slot) for slot, held in self._slots.items() if held.visit == visit]
        return [*slots, ("host", 0, visit)]

    def _name(self, visit: int) -> str:
        return self._trace.visits[visit].name
