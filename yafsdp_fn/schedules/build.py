"""Builds the program of a fixed assignment of units to slots.

for each compute of the trace:
    gather, into free slots, what this compute and the next `prefetch` ones need
    compute
    offload the carry that it saved, or fetch one into the carry slot that it has read, where `remat` says so
    reduce the gradients that are complete; sum them over replicas
what is gathered for one compute, or reduced after one, is one op (merge.py)
with `update`: the optimizer's step of each unit as soon as the trace allows, then the next step's first gathers
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from yafsdp_fn.schedules.merge import merged
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
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.remat import Remat, carry_slots
from yafsdp_fn.schedules.trace import Compute, Trace, Visit

LAG = 2
"""Computes between a unit's reduction and its update, so that the compute stream seldom waits for the reduction."""


def build(
    trace: Trace,
    slots: Mapping[int, int],
    grad_slots: Mapping[int, int],
    *,
    prefetch: int,
    remat: Remat,
    defer: bool = False,
    secondary: Container[int] = frozenset(),
    update: bool = False,
) -> Program:
    """The program for `slots` and `grad_slots`, unit -> slot.

    prefetch: how many computes ahead to gather; remat: which visits recompute
    defer: reduce once per step instead of once per microbatch; every unit needs a gradient slot of its own
    secondary: units that are gathered from all ranks once per step, and then inside the node
    update: the optimizer's step is part of the program, where the step has one
    """
    builder = _Builder(trace, slots, grad_slots, prefetch, defer, secondary)
    recompute, carry_slot = remat(trace), carry_slots(remat, trace)
    before = _same_slot_before(carry_slot)
    for i, now in enumerate(trace.order):
        builder.gather(trace.order[i : i + prefetch + 1])
        visit = trace.visits[now.visit]
        at = tuple(slots[unit] for unit in visit.units)
        if now.kind == "forward":
            builder.ops.append(Forward(visit.id, at, visit.id not in recompute, carry_slot.get(visit.id)))
            if visit.id in before.values():
                builder.ops.append(Offload(visit.id, carry_slot[visit.id]))
            continue
        into = tuple(grad_slots[unit] for unit in visit.trained)
        builder.ops.append(Backward(visit.id, at, into, carry_slot.get(visit.id)))
        if visit.id in before:
            builder.ops.append(Fetch(before[visit.id], carry_slot[visit.id]))
        builder.reduce(i, now, visit)
        if update and trace.updates == "any time":
            builder.update([unit for unit, ready in builder.complete.items() if ready + LAG <= i])
    if update and trace.trains:
        builder.finish()
    needed = _without_needless_gathers(trace, _without_needless_stashes(builder.ops))
    return Program(trace, merged(needed))


def _same_slot_before(carry_slot: Mapping[int, int]) -> dict[int, int]:
    """Visit -> the one before it in its carry slot, which has left it for the host until that visit's backward."""
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    for visit, slot in carry_slot.items():
        if slot in last:
            found[visit] = last[slot]
        last[slot] = visit
    return found


class _Builder:
    def __init__(
        self,
        trace: Trace,
        slots: Mapping[int, int],
        grad_slots: Mapping[int, int],
        prefetch: int,
        defer: bool,
        secondary: Container[int],
    ) -> None:
        self.trace, self.slots, self.grad_slots = trace, slots, grad_slots
        self.prefetch, self.defer, self.secondary = prefetch, defer, secondary
        self.ops: list[Op] = []
        self.held: dict[int, int] = {}  # slot -> unit
        self.stashed: set[int] = set()
        self.complete: dict[int, int] = {}  # unit whose gradient is complete -> compute after which it may be updated
        self.updated: set[int] = set()
        self.last_use = {unit: i for i, compute in enumerate(trace.order) for unit in trace.visits[compute.visit].units}
        used = list(grad_slots.values())
        self.shared = {slot for slot in used if used.count(slot) > 1}

    def gather(self, window: Iterable[Compute]) -> None:
        """Gathers for the computes of `window`, up to the first whose slot an earlier one of the window still reads."""
        busy: set[int] = set()
        for compute in window:
            for unit in self.trace.visits[compute.visit].units:
                slot = self.slots[unit]
                if self.held.get(slot) != unit:
                    if slot in busy:
                        return
                    self.ops.append(Gather((unit,), (slot,), "node" if unit in self.stashed else "shard"))
                    self.held[slot] = unit
                    if unit in self.secondary and unit not in self.stashed:
                        self.ops.append(Stash((unit,), (slot,)))
                        self.stashed.add(unit)
                busy.add(slot)

    def reduce(self, i: int, now: Compute, visit: Visit) -> None:
        """Reduces what is complete after compute `i`, and what must leave a shared slot."""
        order, last = self.trace.order, now.microbatch + 1 == self.trace.microbatches
        after = order[i + 1] if i + 1 < len(order) else None
        following = self.trace.visits[after.visit].trained if after and after.kind == "backward" else ()
        for unit in visit.trained:
            slot, closes = self.grad_slots[unit], unit in now.closes
            # a shared slot must be free before another unit's gradient arrives, complete or not
            if (closes and (last or not self.defer)) or (slot in self.shared and unit not in following):
                self.ops.append(Reduce((unit,), (slot,)))
            if closes and last:
                if self.trace.replicas > 1:
                    self.ops.append(AllReduce((unit,)))
                self.complete[unit] = max(i, self.last_use[unit])

    def update(self, units: Iterable[int]) -> None:
        new = [unit for unit in units if unit not in self.updated]
        self.ops += [Update((unit,)) for unit in new]
        self.updated.update(new)

    def finish(self) -> None:
        """The updates that are left, in the order in which the next step visits their units, and its first gathers."""
        if self.trace.updates == "never":
            raise ValueError("update=True: this step has no optimizer to put into the program; it is for ya.train_step")
        if self.trace.updates == "after norm" and any(unit.trainable for unit in self.trace.units):
            self.ops.append(Norm(tuple(sorted(self.complete))))
        order = [unit for visit in self.trace.visits for unit in visit.units]
        order += [unit.id for unit in self.trace.units]
        first, self.stashed = self.trace.order[: self.prefetch + 1], set()
        wanted = {unit for compute in first for unit in self.trace.visits[compute.visit].units}
        wanted &= self._fitting(first)
        for unit in dict.fromkeys(order):
            if self.trace.units[unit].trainable:
                self.update([unit])
            slot = self.slots[unit]
            if unit in wanted and (self.held.get(slot) != unit or self.trace.units[unit].trainable):
                self.ops.append(Gather((unit,), (slot,)))
                self.held[slot] = unit

    def _fitting(self, window: Iterable[Compute]) -> set[int]:
        """Units of `window` up to the first that would need the slot of an earlier one."""
        held: dict[int, int] = {}
        for compute in window:
            for unit in self.trace.visits[compute.visit].units:
                if held.setdefault(self.slots[unit], unit) != unit:
                    return set(held.values())
        return set(held.values())


def _without_needless_stashes(ops: list[Op]) -> list[Op]:
    """Drops the stashes that no gather reads."""
    read = {unit for op in ops if isinstance(op, Gather) and op.source == "node" for unit in op.units}
    return [op for op in ops if not isinstance(op, Stash) or read.issuperset(op.units)]


def _without_needless_gathers(trace: Trace, ops: list[Op]) -> tuple[Op, ...]:
    """Drops a step's first gather into each slot where the slot still holds, from the step before, what it gathers.

    That is the case for frozen units, and for those that were gathered after their update.
    """
    first: dict[int, int] = {}  # slot -> op
    last: dict[int, tuple[int, bool]] = {}  # slot -> unit that it ends with, whether in the next step's version
    updated: set[int] = set()
    for index, op in enumerate(ops):
        if isinstance(op, Update):
            updated.update(op.units)
        if isinstance(op, Gather):
            ((unit,), (slot,), _) = op
            first.setdefault(slot, index)
            last[slot] = (unit, unit in updated or not trace.units[unit].trainable)
    needless = {index for slot, index in first.items() if last[slot] == (ops[index].units[0], True)}  # type: ignore[union-attr]
    return tuple(op for index, op in enumerate(ops) if index not in needless)
