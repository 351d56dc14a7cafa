"""The rule `offload`: a carry that a visit saves is in one place at a time until its backward.

Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t
                         slot s  ------------------------------------->    Backward from slot s

A slot is written only when it is free, since what is lost cannot be made again.
"""

from typing import NamedTuple

from yafsdp_fn.schedules.ops import Backward, Buffer, Fetch, Forward, Offload
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Rules


class Carry(NamedTuple):
    """What a visit has saved, and the op that put it where it is."""

    visit: int
    op: int


class CarryRules(Rules):
    """Where carries are, op by op."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._slots: dict[int, Carry] = {}
        self._host: dict[int, Carry] = {}  # by visit
        self._saved: dict[tuple[int, int], int] = {}  # (visit, microbatch) -> the forward that saved a carry

    def save(self, op: Forward) -> None:
        if op.carry_slot is not None:
            self._put(op.carry_slot, Carry(op.visit, self.at))
            self._saved[op.visit, op.microbatch] = self.at

    def load(self, op: Backward) -> None:
        saved = self._saved.pop((op.visit, op.microbatch), None)
        name = self.visit(op.visit)
        if op.carry_slot is not None:
            if saved is None:
                self.refuse("offload", f"the forward of {name} has saved no carry")
            self._take(op.visit, op.carry_slot)
        elif saved is not None:
            self.refuse("offload", f"{name} has saved its carry in a carry slot", self._where(op.visit), saved)

    def offload(self, op: Offload) -> None:
        self._host[op.visit] = self._take(op.visit, op.carry_slot)._replace(op=self.at)

    def fetch(self, op: Fetch) -> None:
        carry = self._host.pop(op.visit, None)
        if carry is None:
            why = f"nothing that {self.visit(op.visit)} has saved is on the host"
            self.refuse("offload", why, ("host", 0, op.visit))
        self._put(op.carry_slot, carry._replace(op=self.at))

    def end_of_carries(self) -> None:
        for (visit, _), op in self._saved.items():
            self.refuse("offload", f"no backward reads what {self.visit(visit)} has saved", self._where(visit), op)

    def _put(self, slot: int, carry: Carry) -> None:
        if (held := self._slots.setdefault(slot, carry)) is not carry:
            why = f"carry slot {slot} still holds what {self.visit(held.visit)} has saved"
            self.refuse("offload", why, ("carry slot", 0, slot), held.op)

    def _take(self, visit: int, slot: int) -> Carry:
        held = self._slots.pop(slot, None)
        if held is None or held.visit != visit:
            there = "nothing" if held is None else f"what {self.visit(held.visit)} has saved"
            why = f"carry slot {slot} holds {there}, it must hold what {self.visit(visit)} has saved"
            self.refuse("offload", why, ("carry slot", 0, slot), None if held is None else held.op)
        return held

    def _where(self, visit: int) -> Buffer:
        """The buffer that the carry of `visit` is in."""
        slots = (("carry slot", 0, slot) for slot, held in self._slots.items() if held.visit == visit)
        return next(slots, ("host", 0, visit))
