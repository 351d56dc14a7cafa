"""The rules `norm` and `update`: an optimizer's step, unit by unit, in parts."""

from yafsdp_fn.schedules.further_ops import Exchange
from yafsdp_fn.schedules.ops import Backward, Forward, Norm, Update
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.rules.gradients import GradientRules


class UpdateRules(GradientRules):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.begun: dict[int, int] = {}  # unit -> op that began its update
        self.turns: dict[int, int] = {}  # unit -> parts and exchanges of its update that have been
        self.norm: int | None = None
        self.last_use = {
            unit: index
            for index, op in enumerate(self.ops)
            if isinstance(op, Forward | Backward)
            for unit in self.trace.visits[op.visit].units
        }
        self.last_compute = max(self.last_use.values(), default=-1)

    def take_norm(self, op: Norm) -> None:
        if self.trace.update_when == "never":
            self.refuse("norm", "this step has no optimizer, so that nothing would read the norm")
        if self.norm is not None:
            self.refuse("norm", "the norm was taken already", ("norm",), self.norm)
        if self.at < self.last_compute:
            # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
            self.refuse("norm", "the norm comes before the last compute", ("norm",), self.last_compute)
        if wrong := set(self.trace.trained) ^ set(op.units):
            unit = min(wrong)
            why = "is trainable, and missing" if self.trace.units[unit].trainable else "is frozen"
            self.refuse("norm", f"it must be of all trainable units: {self.unit(unit)} {why}")
        for unit in op.units:
            if unit in self.begun:  # the update has scaled the gradient in place
                why = f"the update of {self.unit(unit)} has overwritten its gradient"
                self.refuse("norm", why, ("grad shard", unit), self.begun[unit])
            self.complete("norm", unit)
        self.norm = self.at

    # ---- the optimizer

    def update(self, op: Update) -> None:
        for unit in op.units:
            if self.trace.update_when == "never":
                self.refuse("update", "this step has no optimizer: only a train_step has")
            if not self.trace.units[unit].trainable:
                self.refuse("update", f"{self.unit(unit)} is frozen")
            if unit in self.updated:
                self.refuse("update", f"{self.unit(unit)} was updated already", ("shard", unit), self.updated[unit])
            self.turn(unit, 2 * op.part)
            if op.part + 1 == self.trace.parts(unit):
                self.updated[unit] = self.at
            if op.part:
                continue
            self.begun[unit] = self.at
            if self.at < (last := self.last_use.get(unit, -1)):
                # at world size 1 slots are the shards, and the later compute would read new weights
                why = f"a later compute uses {self.unit(unit)}, and where one rank holds all of it slots are the shards"
                self.refuse("update", why, ("shard", unit), last)
            if unit not in self.needed and self.at < self.last_compute:
                # what it gets comes from the loss itself, at the end of the backward; nothing else is known before
                why = f"no visit trains {self.unit(unit)}: its gradient is known only after the last compute"
                self.refuse("update", why, ("grad shard", unit), self.last_compute)
            self.complete("update", unit)
            if self.norm is None and self.trace.update_when == "after norm":
                why = (
                    f"{self.unit(unit)} is updated before the norm of the whole gradient is known, but this step clips "
                    "by it, or skips steps that are not finite. Either take the norm first, or have neither: no "
                    "clip_by_global_norm, and train_step(skip_nonfinite=False)"
                )
                self.refuse("update", why, ("norm",))

    def exchange(self, op: Exchange) -> None:
        for unit in op.units:
            if unit in self.updated or op.part + 1 >= self.trace.parts(unit):
                parts = f"{self.trace.parts(unit)} part{'s' * (self.trace.parts(unit) > 1)}"
                why = f"nothing of {self.unit(unit)} travels after part {op.part}: its update has {parts}"
                self.refuse("update", why, ("optimizer", unit), self.updated.get(unit))
            self.turn(unit, 2 * op.part + 1)

    def turn(self, unit: int, number: int) -> None:
        """The parts of an update and the exchanges between them, counted."""
        expected = self.turns.get(unit, 0)
        if number != expected:
            name = f"{'the exchange after ' * (expected % 2)}part {expected // 2}"
            why = f"next in the update of {self.unit(unit)} is {name}"
            self.refuse("update", why, ("optimizer", unit), self.begun.get(unit))
        self.turns[unit] = expected + 1

    def end_of_updates(self) -> None:
        if self.norm is not None and not self.program.has_updates:
            self.at = self.norm
            self.refuse("norm", "nothing reads the norm: the program has no updates", ("norm",))
        for record in self.trace.units:
            if record.id in self.begun and record.id not in self.updated:
                why = f"the update of {record.name} does not end: it has {self.trace.parts(record.id)} parts"
                self.refuse("update", why, ("shard", record.id), self.begun[record.id])
            if self.program.has_updates and record.trainable and record.id not in self.updated:
                self.refuse("update", f"{record.name} is never updated, other units are", ("shard", record.id))
