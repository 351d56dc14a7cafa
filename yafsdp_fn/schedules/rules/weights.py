"""The rules `weights`, `carry` and `secondary`: what slots and secondary shards hold, and of which step."""

from typing import NamedTuple

from yafsdp_fn.schedules.further_ops import Stash
from yafsdp_fn.schedules.ops import Gather
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.rules.flows import FlowRules


class Weights(NamedTuple):
    """What a slot holds: a unit's weights of this step (version 0) or of the next (1), and the op that wrote them,
    -1 where the step before did."""

    unit: int
    version: int
    op: int


class WeightRules(FlowRules):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.carried = program.carried()
        self.slot_bytes = program.slot_bytes()
        self.weights = {slot: Weights(unit, 0, -1) for slot, unit in self.carried.items()}
        self.secondary: dict[int, tuple[int, Weights]] = {}  # unit -> op that stashed it, what it found in the slot
        self.updated: dict[int, int] = {}  # unit -> op that ended its update

    def gather(self, op: Gather) -> None:
        for unit, slot in zip(op.units, op.slots, strict=True):
            if op.source == "node":
                self.finds_stashed(unit)
            self.weights[slot] = Weights(unit, int(unit in self.updated), self.at)

    def finds_stashed(self, unit: int) -> None:
        if unit not in self.secondary:
            self.refuse("secondary", f"nothing was stashed of {self.unit(unit)} in this step")
        (stashed, held), buffer = self.secondary[unit], ("secondary", 0, unit)
        if unit in self.updated:
            why = f"the secondary shard of {self.unit(unit)} is of the weights before its update"
            self.refuse("secondary", why, buffer, stashed)
        if held[:2] != (unit, 0):
            why = f"what was stashed of {self.unit(unit)} is from a slot that held {self.held(held)}"
            self.refuse("secondary", why, buffer, stashed)

    def stash(self, op: Stash) -> None:
        """What it finds matters to those that gather it."""
        for unit, slot in zip(op.units, op.slots, strict=True):
            room, size = self.slot_bytes[slot], self.trace.units[unit].gather_bytes
            if room < size:
                why = f"slot {slot} has {room} bytes, {self.unit(unit)} is of {size}"
                self.refuse("secondary", why, ("slot", 0, slot), self.weights[slot].op)
            self.secondary[unit] = self.at, self.weights[slot]

    def held(self, held: Weights) -> str:
        return self.unit(held.unit) + " of the next step" * held.version

    def reads(self, units: tuple[int, ...], slots: tuple[int, ...]) -> None:
        for unit, slot in zip(units, slots, strict=True):
            held = self.weights[slot]
            if held[:2] != (unit, 0):
                why = f"slot {slot} holds {self.held(held)}, it must hold {self.unit(unit)}"
                self.refuse("weights", why, ("slot", 0, slot), held.op)

    def end_of_weights(self) -> None:
        """What the program did not gather first is there again."""
        for slot, carried in self.carried.items():
            held = self.weights[slot]
            if held.unit == carried and held.version == self.trace.units[carried].trainable:
                continue  # without updates in the program, one of all trainable units follows
            uses = (any(slot == at for _, at in self.trace.weights_of(op)) for op in self.ops)
            self.at = list(uses).index(True)  # the first one
            buffer = ("slot", 0, slot)
            if held.op < 0 or (not self.program.has_updates and self.trace.units[carried].trainable):
                why = f"slot {slot} holds no weights of this step; it must hold {self.unit(carried)}"
                self.refuse("weights", why, buffer)
            why = (
                f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
                f"{self.unit(carried)}; it will hold {self.unit(held.unit)}{' of this step' * (not held.version)}. "
                f"Gather {self.unit(carried)} first, or once more after its update"
            )
            self.refuse("carry", why, buffer, held.op)
