"""Ops that a program has where it wants more than to shard: on replicas, nodes or stages, with owners or offloads.

Stash(units, slots)                  keep this rank's part of each slot, for gathers inside the node
AllReduce(units, over)               sum gradient shards over replicas, or over the stages that share a unit
Exchange(units, part)                between two parts of an update: leaves travel to owners, or back to shards
Offload(visit, carry_slot)           move what the visit has saved from its carry slot to the host
Fetch(visit, carry_slot)             move it back, into a carry slot that its backward reads
Send(flow, carry_slot)               send what a carry slot holds to another stage of the pipeline
Receive(flow, carry_slot)            receive it there
"""

from collections.abc import Hashable
from typing import Literal, NamedTuple

from yafsdp_fn.schedules.buffers import Uses, carry, in_set, of_units
from yafsdp_fn.schedules.split import Parcel


class Stash(NamedTuple):
    """Copies this rank's part, 1 / local ranks, of weight slot `slots[i]` to the secondary shard of `units[i]`."""

    units: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def stream(self) -> str:
        return "gather"

    def uses(self, at: Hashable = 0) -> Uses:
        return in_set("slot", at, self.slots), in_set("secondary", at, self.units)


class AllReduce(NamedTuple):
    """Sums the gradient shards of `units` over replicas, or over the pipeline stages that hold them, in place: once,
    when they are complete."""

    units: tuple[int, ...]
    over: Literal["replicas", "stages"] = "replicas"

    @property
    def stream(self) -> str:
        return "replicate"

    def uses(self, at: Hashable = 0) -> Uses:
        return [], [*of_units("grad shard", self.units), ("replicate",)]


class Exchange(NamedTuple):
    """Between parts `part` and `part + 1` of the update of `units`: whole leaves travel to the ranks that own them,
    after even parts, or back to shards, after odd ones. What travels belongs to the optimizer."""

    units: tuple[int, ...]
    part: int

    @property
    def stream(self) -> str:
        return "reduce"

    def uses(self, at: Hashable = 0) -> Uses:
        return [], of_units("optimizer", self.units)


class Offload(NamedTuple):
    """Copies the carry of `visit` from `carry_slot`, which is free afterwards, to the visit's buffer on the host."""

    visit: int
    carry_slot: int

    @property
    def stream(self) -> str:
        return "offload"

    def uses(self, at: Hashable = 0) -> Uses:
        return carry(at, self.carry_slot), [("host", at, self.visit)]


class Fetch(NamedTuple):
    """Copies the carry of `visit` from its buffer on the host to `carry_slot`."""

    visit: int
    carry_slot: int

    @property
    def stream(self) -> str:
        return "offload"

    def uses(self, at: Hashable = 0) -> Uses:
        return [("host", at, self.visit)], carry(at, self.carry_slot)


class Send(NamedTuple):
    """Sends what `carry_slot` holds of `flow` in a microbatch to the stage that takes it; the slot is free afterwards.

    back: it is the gradient, which goes to the stage that the flow came from
    """

    flow: int
    carry_slot: int
    microbatch: int = 0
    back: bool = False

    @property
    def parcel(self) -> Parcel:
        """What travels."""
        return Parcel(self.flow, self.microbatch, self.back)

    @property
    def stream(self) -> str:
        return "send"

    def uses(self, at: Hashable = 0) -> Uses:
        return carry(at, self.carry_slot), []


class Receive(NamedTuple):
    """Receives what a `Send` of the same numbers sends, into `carry_slot`."""

    flow: int
    carry_slot: int
    microbatch: int = 0
    back: bool = False

    @property
    def parcel(self) -> Parcel:
        """What travels."""
        return Parcel(self.flow, self.microbatch, self.back)

    @property
    def stream(self) -> str:
        return "receive"

    def uses(self, at: Hashable = 0) -> Uses:
        return [], carry(at, self.carry_slot)
