"""The rule `flow`: what crosses between segments is in one carry slot at a time, from the compute that makes it to the
one that takes it.

given by a compute -> slot s -> Send ... of another stage ... Receive -> slot t -> taken by a compute
given by a compute -> slot s -> taken by a compute, where both segments are on one stage
"""

from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.ops import ComputeOp, kind_of
from yafsdp_fn.schedules.rules.carries import CarryRules
from yafsdp_fn.schedules.split import Parcel


class FlowRules(CarryRules):
    """What comes to a stage, and what leaves it, op by op. That stages fit together is asked in stages/proof.py."""

    def take_flows(self, op: ComputeOp) -> None:
        self._slots_for(op, "takes")

    def give_flows(self, op: ComputeOp) -> None:
        self._slots_for(op, "gives")

    def _slots_for(self, op: ComputeOp, field: str) -> None:
        split, slots = self.trace.split, getattr(op, field)
        parcels = () if split is None else getattr(split, field)(kind_of(op), op.visit, op.microbatch)
        if len(parcels) != len(slots):
            words = ", ".join(map(self.carry, parcels)) or "nothing"
            self.refuse("flow", f"it {field} {words}: expected {len(parcels)} carry slots, got {slots}")
        for slot, parcel in zip(slots, parcels, strict=True):
            if field == "takes":
                self.take("flow", slot, parcel)
            else:
                self.put("flow", slot, parcel)

    def send(self, op: Send) -> None:
        parcel = self._travels(op)
        self.take("flow", op.carry_slot, parcel)

    def receive(self, op: Receive) -> None:
        self.put("flow", op.carry_slot, self._travels(op))

    def _travels(self, op: Send | Receive) -> Parcel:
        """What it sends or receives, which must be between this stage and another."""
        assert self.trace.split is not None, "well_formed"
        ends = self.trace.split.ends(op.flow, op.back)
        if ends[isinstance(op, Receive)] != self.trace.stage or ends[0] == ends[1]:
            way = f"from stage {ends[0]} to stage {ends[1]}" if ends[0] != ends[1] else f"inside stage {ends[0]}"
            self.refuse("flow", f"that goes {way}; this is stage {self.trace.stage}")
        return op.parcel
