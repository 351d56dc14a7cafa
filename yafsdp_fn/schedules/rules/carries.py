"""The rule `offload`: a carry that a visit saves is in one place at a time until its backward.

Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t
                         slot s  ------------------------------------->    Backward from slot s

A slot is written only when it is free, since what is lost cannot be made again.
"""

from typing import NamedTuple

from yafsdp_fn.schedules.buffers import Buffer
from yafsdp_fn.schedules.further_ops import Fetch, Offload
from yafsdp_fn.schedules.ops import Backward, Forward
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Rules
from yafsdp_fn.schedules.split import Parcel
from yafsdp_fn.schedules.text import describe_parcel


class Carry(NamedTuple):
    """What a visit has saved, by its number, or a parcel of a pipeline, and the op that put it where it is."""

    what: int | Parcel
    op: int


class CarryRules(Rules):
    """What carry slots and the host hold, op by op."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._slots: dict[int, Carry] = {}
        self._host: dict[int, Carry] = {}  # by visit
        self._saved: dict[tuple[int, int], int] = {}  # (visit, microbatch) -> the forward that saved a carry

    def save(self, op: Forward) -> None:
        if op.carry_slot is not None:
            if self.trace.split is not None:
                self.refuse("offload", "carries are known by their visit, and a stage has several microbatches of it")
            self.put("offload", op.carry_slot, op.visit)
            self._saved[op.visit, op.microbatch] = self.at

    def load(self, op: Backward) -> None:
        saved = self._saved.pop((op.visit, op.microbatch), None)
        name = self.visit(op.visit)
        if op.carry_slot is not None:
            if saved is None:
                self.refuse("offload", f"the forward of {name} has saved no carry")
            self.take("offload", op.carry_slot, op.visit)
        elif saved is not None:
            self.refuse("offload", f"{name} has saved its carry in a carry slot", self._where(op.visit), saved)

    def offload(self, op: Offload) -> None:
        self.take("offload", op.carry_slot, op.visit)
        self._host[op.visit] = Carry(op.visit, self.at)

    def fetch(self, op: Fetch) -> None:
        carry = self._host.pop(op.visit, None)
        if carry is None:
            why = f"nothing that {self.visit(op.visit)} has saved is on the host"
            self.refuse("offload", why, ("host", 0, op.visit))
        self.put("offload", op.carry_slot, op.visit)

    def end_of_carries(self) -> None:
        for (visit, _), op in self._saved.items():
            self.refuse("offload", f"no backward reads what {self.visit(visit)} has saved", self._where(visit), op)
        for slot, held in self._slots.items():
            self.refuse("flow", f"nothing takes {self.carry(held.what)}", ("carry slot", 0, slot), held.op)

    def put(self, rule: str, slot: int, what: int | Parcel) -> None:
        """Fills a carry slot, which must be free: what is lost cannot be made again."""
        if (held := self._slots.get(slot)) is not None:
            why = f"carry slot {slot} still holds {self.carry(held.what)}"
            self.refuse(rule, why, ("carry slot", 0, slot), held.op)
        self._slots[slot] = Carry(what, self.at)

    def take(self, rule: str, slot: int, what: int | Parcel) -> None:
        """Empties a carry slot, which must hold `what`."""
        held = self._slots.pop(slot, None)
        if held is None or held.what != what:
            there = "nothing" if held is None else self.carry(held.what)
            why = f"carry slot {slot} holds {there}, it must hold {self.carry(what)}"
            self.refuse(rule, why, ("carry slot", 0, slot), None if held is None else held.op)

    def carry(self, what: int | Parcel) -> str:
        """In words."""
        return describe_parcel(what, self.trace) if isinstance(what, Parcel) else f"what {self.visit(what)} has saved"

    def _where(self, visit: int) -> Buffer:
        """The buffer that the carry of `visit` is in."""
        slots = (("carry slot", 0, slot) for slot, held in self._slots.items() if held.what == visit)
        return next(slots, ("host", 0, visit))
