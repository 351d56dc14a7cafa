"""Hazards: who must wait for whom. Nobody ever writes a wait by hand.

    for buffer in reads:   wait for its last writer; become a reader
    for buffer in writes:  wait for its last writer and for the readers since; become the writer

Every op declares the buffers it reads and writes; one scoreboard runs through the whole life of a state. A wait always
points to an op issued earlier, and all ranks issue in one order, so nothing that is issued can deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from yafsdp_fn.schedules.ops import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Reduce,
    Stash,
    Update,
)

Key = TypeVar("Key")
Buffer = tuple[Hashable, ...]
"""`("slot", set, i)`, `("grad slot", set, i)`, `("carry slot", set, i)`, `("secondary", set, unit)`, `("host", set,
visit)`: of a slot set. `("shard", unit)`, `("grad shard", unit)`, `("optimizer", unit)`, `("receive",)`,
`("replicate",)`, `("norm",)`: of a state. The working copy of a shard is refreshed by the update that writes the shard:
one buffer."""

OF_A_SET = ("slot", "grad slot", "carry slot", "secondary", "host")
"""The kinds of buffers that belong to a slot set."""


def uses(op: Op, slots: Hashable = 0) -> tuple[list[Buffer], list[Buffer]]:
    """`(reads, writes)` of an op; `slots` names the slot set it runs in."""
    match op:
        case Gather(units, into, source):
            shards: list[Buffer] = [("shard", unit) for unit in units]
            if source == "node":
                shards = [("secondary", slots, unit) for unit in units]
            return shards, [("slot", slots, slot) for slot in into]
        case Stash(units, at):
            return [("slot", slots, slot) for slot in at], [("secondary", slots, unit) for unit in units]
        case Forward(_, at, _, carry):
            return [("slot", slots, slot) for slot in at], _carry_slot(slots, carry)
        case Backward(_, at, into, carry):
            reads: list[Buffer] = [("slot", slots, slot) for slot in at]
            return reads + _carry_slot(slots, carry), [("grad slot", slots, slot) for slot in into]
        case Offload(visit, carry):
            return _carry_slot(slots, carry), [("host", slots, visit)]
        case Fetch(visit, carry):
            return [("host", slots, visit)], _carry_slot(slots, carry)
        case Reduce(units, source):
            return [("grad slot", slots, slot) for slot in source], [*_grad_shards(units), ("receive",)]
        case AllReduce(units):
            return [], [*_grad_shards(units), ("replicate",)]
        case Norm(units):
            return _grad_shards(units), [("norm",)]
        case Update(units):
            # a fused kernel writes the scaled gradient back
            own: list[Buffer] = [(name, unit) for unit in units for name in ("shard", "optimizer", "grad shard")]
            return [("norm",)], own


def _grad_shards(units: Iterable[int]) -> list[Buffer]:
    return [("grad shard", unit) for unit in units]


def _carry_slot(slots: Hashable, carry: int | None) -> list[Buffer]:
    return [] if carry is None else [("carry slot", slots, carry)]


class Scoreboard(Generic[Key]):
    """Keys identify uses in issue order: op numbers in `verify`, events in the engine."""

    def __init__(self) -> None:
        self._writer: dict[Buffer, Key] = {}
        self._readers: dict[Buffer, dict[str, Key]] = {}

    def add(self, key: Key, stream: str, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> list[Key]:
        """Records a use; returns what it must wait for. A stream runs in order: its last reader stands for all."""
        waits: list[Key] = []
        for buffer in reads:
            if buffer in self._writer:
                waits.append(self._writer[buffer])
            self._readers.setdefault(buffer, {})[stream] = key
        for buffer in writes:
            if buffer in self._writer:
                waits.append(self._writer[buffer])
            waits += self._readers.get(buffer, {}).values()
            self._writer[buffer], self._readers[buffer] = key, {}
        return [wait for wait in waits if wait is not key]

    def forget(self, *buffers: Buffer) -> None:
        """Drops buffers that no longer exist."""
        for buffer in buffers:
            self._writer.pop(buffer, None)
            self._readers.pop(buffer, None)

    def forget_set(self, slots: Hashable) -> None:
        """Drops the buffers of a slot set."""
        self.forget(*[b for b in {*self._writer, *self._readers} if b[0] in OF_A_SET and b[1] == slots])

    def clear(self) -> None:
        """Forgets everything; only when all streams are idle."""
        self._writer.clear()
        self._readers.clear()
