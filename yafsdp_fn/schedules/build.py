"""Builds a program from a fixed assignment of units to slots; collectives that are waited for together are one op."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Literal

from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Norm, Op, Reduce, Stash, Update
from yafsdp_fn.program.program import Program, Updating
from yafsdp_fn.program.trace import Compute, Trace, UnitSpec, Visit, reads_of, writes_of
from yafsdp_fn.schedules.remat import Offloading, Remat, offloaded

# ---- Which unit lives in which slot: layers alternate among a few, everything else has a slot of its own.
#
# A large embedding therefore does not make every slot large, and two slots are enough for any number of layers.


def alternating_slots(
    visits: tuple[Visit, ...],
    units: tuple[UnitSpec, ...],
    *,
    width: int = 2,
    resident: int = 0,
    apart: Container[int] = (),
) -> dict[int, int]:
    """Returns unit -> slot: layers alternate among `width` slots, all others (and the last `resident` layers) have
    their own.

    Layers that one visit uses together are in different lanes of `width` slots; a layer for which no lane serves all
    of its visits has a slot of its own. apart: units that have slots of their own in any case

    >>> ya.schedules.alternating_slots(trace.visits, trace.units)
    {2: 0, 3: 1, 4: 0, 5: 1, 0: 2, 1: 3}
    """
    # in each lane layers take turns
    lane = _lanes(visits, units)
    lanes = max(lane.values(), default=-1) + 1
    slots: dict[int, int] = {}
    for k in range(lanes):
        members = [unit for unit in lane if lane[unit] == k]
        for index, unit in enumerate(members[: max(0, len(members) - resident)]):
            if unit not in apart:
                slots[unit] = k * width + index % width
    # what a visit would have twice in one slot gets its own
    for visit in visits:
        taken: set[int] = set()
        for unit in visit.units:
            if unit in slots and slots[unit] in taken:
                del slots[unit]
            taken.add(slots.get(unit, -1))
    own = [unit.id for unit in units if unit.id not in slots]
    return slots | {unit: lanes * width + index for index, unit in enumerate(own)}


def _lanes(visits: tuple[Visit, ...], units: tuple[UnitSpec, ...]) -> dict[int, int]:
    """Returns layer -> lane, in the order of visits: its number among the layers of the first visit that uses it."""
    lane: dict[int, int] = {}
    for visit in visits:
        layers = [unit for unit in visit.units if units[unit].stack is not None]
        for number, unit in enumerate(layers):
            lane.setdefault(unit, number)
    return lane


def own_slots(units: tuple[UnitSpec, ...]) -> dict[int, int]:
    """Returns unit -> slot: one each.

    >>> ya.schedules.own_slots(trace.units)
    {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    """
    return {unit.id: unit.id for unit in units}


# ---- Builds the program of a fixed assignment of units to slots.
#
# for each compute of the trace:
#     gather, into free slots, what this compute and the next `prefetch` ones need
#     compute
#     reduce the gradients that are complete; sum them over replicas
# with `update`: the norm, the optimizer's step of each unit, and the next step's first gathers
# what is gathered for one compute, or reduced after one, is one op, and one message: with `scan(unroll=k)` k layers,
# which cost latency, not bytes, where they are tiny
# a forward whose backward comes next may begin its gradients, where their slots are free
# where `remat` says so, carries move to the host and back (remat.py)


def build(
    trace: Trace,
    slots: Mapping[int, int],
    grad_slots: Mapping[int, int],
    *,
    prefetch: int,
    remat: Remat,
    defer: bool | Container[int] = False,
    secondary: Container[int] = frozenset(),
    update: bool = False,
) -> Program:
    """Returns the program for `slots` and `grad_slots`, unit -> slot.

    prefetch: how many computes ahead to gather; remat: which visits recompute
    defer: reduce once per step instead of once per microbatch, all units or these; each needs a gradient slot of its
        own
    secondary: units that are gathered from all ranks once per step, and then inside the node
    update: the optimizer's step is part of the program, where the step has one

    >>> slots = ya.schedules.own_slots(trace.units)
    >>> program = ya.schedules.build(trace, slots, slots, prefetch=2, remat=ya.schedules.remat.none)
    >>> ya.verify(program).count(ya.schedules.Gather)
    6
    """
    if isinstance(remat, Offloading) and trace.split is not None:
        raise ValueError(
            "remat.offload: a pipeline stage has several microbatches under way, and the host memory of a visit holds "
            "one; take remat.all, whose carries stay on the device"
        )
    deferred: Container[int] = () if isinstance(defer, bool) else defer
    if defer is True:
        deferred = range(len(trace.units))
    # the ops, compute by compute
    builder = _Builder(trace, slots, grad_slots, prefetch, deferred, secondary)
    recompute = remat(trace)
    for i, now in enumerate(trace.order):
        builder.gather(trace.order[i : i + prefetch + 1])
        builder.ops.append(op_of(now, trace, slots, grad_slots, recompute))
        if now.kind != "forward":
            builder.reduce(i, now)
    builder.ops += sums_over_stages(trace)
    if update and trace.trains:
        builder.finish()
    # without what nothing reads
    again = {unit for op in builder.ops if isinstance(op, Gather) and op.source == "node" for unit in op.units}
    read = [op for op in builder.ops if not isinstance(op, Stash) or again.issuperset(op.units)]
    ops: list[Op] = begun_early(_without_needless_gathers(trace, read))
    return Program(trace, tuple(offloaded(ops, remat, trace) if isinstance(remat, Offloading) else ops))


def op_of(
    now: Compute, trace: Trace, slots: Mapping[int, int], grad_slots: Mapping[int, int], recompute: Container[int]
) -> ComputeOp:
    """Returns the op of a compute. slots, grad_slots: unit -> slot; recompute: visits that keep no graph"""
    at = tuple(slots[unit] for unit in reads_of(now, trace))
    if now.kind == "forward":
        return Forward(now.visit, at, now.visit not in recompute, now.microbatch)
    into = tuple(grad_slots[unit] for unit in writes_of(now, trace))
    half = "both" if now.kind == "backward" else now.kind
    return Backward(now.visit, at, into, now.microbatch, half=half)


def sums_over_stages(trace: Trace) -> list[Op]:
    """Returns the gradients of units that pipeline stages share: after all computes, in one order on all of these."""
    return [AllReduce((unit,), "stages") for unit in trace.shared]


# ---- the builder


@dataclasses.dataclass
class _Builder:
    trace: Trace
    slots: Mapping[int, int]
    grad_slots: Mapping[int, int]
    prefetch: int
    deferred: Container[int]
    secondary: Container[int]

    def __post_init__(self) -> None:
        self.ops: list[Op] = []
        # what is gathered, and in which update it is
        self.held: dict[int, int] = {}  # slot -> unit
        self.stashed: set[int] = set()
        self.updating = Updating(self.trace.lent)
        self.wanted: dict[int, int] = {}  # slot -> unit that the next step's first gathers put there
        self.last_write = {unit: i for i, now in enumerate(self.trace.order) for unit in writes_of(now, self.trace)}
        # gradients
        used = list(self.grad_slots.values())
        self.shared = {slot for slot in used if used.count(slot) > 1}

    # ---- the ops of a compute

    def gather(self, window: Iterable[Compute]) -> None:
        """Gathers for the computes of `window`, up to the first whose slot an earlier one of the window still reads."""
        busy: set[int] = set()
        for compute in window:
            units = reads_of(compute, self.trace)
            missing: list[int] = []
            for unit in units:
                slot = self.slots[unit]
                if self.held.get(slot) != unit:
                    if slot in busy:
                        break
                    missing.append(unit)
                    self.held[slot] = unit
                busy.add(slot)
            in_node = [unit for unit in missing if unit in self.stashed]
            self._gather_together([unit for unit in missing if unit not in in_node], "shard")
            self._gather_together(in_node, "node")
            if any(self.held.get(self.slots[unit]) != unit for unit in units):
                return

    def _gather_together(self, units: Sequence[int], source: Literal["shard", "node"]) -> None:
        """Gathers units for one compute, and stashes those that are gathered inside the node from now on."""
        if units:
            self.ops.append(Gather(tuple(units), tuple(self.slots[unit] for unit in units), source))
        for unit in units:
            if unit in self.secondary and unit not in self.stashed:
                self.ops.append(Stash((unit,), (self.slots[unit],)))
                self.stashed.add(unit)

    def reduce(self, i: int, now: Compute) -> None:
        """Reduces the gradients that are complete after compute `i`, and those that must leave a shared slot."""
        after = self.trace.order[i + 1 : i + 2]
        following = writes_of(after[0], self.trace) if after else ()
        reduced: list[int] = []
        summed: list[int] = []
        for unit in writes_of(now, self.trace):
            slot = self.grad_slots[unit]
            closes = unit in now.closes
            last = self.last_write[unit] == i
            # a shared slot must be free before another unit's gradient arrives, complete or not
            if (closes and (last or unit not in self.deferred)) or (slot in self.shared and unit not in following):
                reduced.append(unit)
            if closes and last and self.trace.replicas > 1:
                summed.append(unit)
        if reduced:
            self.ops.append(Reduce(tuple(reduced), tuple(self.grad_slots[unit] for unit in reduced)))
        if summed:
            self.ops.append(AllReduce(tuple(summed)))

    # ---- updates, and gathers for the next step

    def update(self, units: Iterable[int]) -> None:
        """Begins the updates of `units`, and goes on with those that have several parts."""
        ops, done = self.updating.turn(units)
        self.ops += ops
        for unit in done:
            self.gather_ahead(unit)

    def gather_ahead(self, unit: int) -> None:
        """Gathers `unit` for the next step, if that begins with it."""
        slot = self.slots[unit]
        if self.wanted.get(slot) == unit and (self.held.get(slot) != unit or self.trace.units[unit].trainable):
            self.ops.append(Gather((unit,), (slot,)))
            self.held[slot] = unit

    # ---- the end of the step

    def finish(self) -> None:
        """The norm, the updates in the order in which the next step visits their units, and its first gathers."""
        if self.trace.update_when == "never":
            raise ValueError("update=True: this step has no optimizer to put into the program; it is for ya.train_step")
        if self.trace.trained:
            self.ops.append(Norm(self.trace.trained))
        # what the next step gathers first
        visits = self.trace.visits
        first = self.trace.order[: self.prefetch + 1]
        wanted: dict[int, int] = {}  # slot -> unit, up to the first unit that would need the slot of an earlier one
        for unit in (unit for compute in first for unit in reads_of(compute, self.trace)):
            if wanted.setdefault(self.slots[unit], unit) != unit:
                break
        self.wanted = wanted
        # updates, in the order of visits
        order = [*(unit for visit in visits for unit in visit.units), *(unit.id for unit in self.trace.units)]
        for unit in dict.fromkeys(order):
            if self.trace.units[unit].trainable:
                self.update([unit])
            else:
                self.gather_ahead(unit)
        while self.updating.open:
            self.update([])


# ---- Passes over a program.


def _without_needless_gathers(trace: Trace, ops: list[Op]) -> list[Op]:
    """Drops a step's first gather into each slot where the slot still holds, from the step before, what it gathers.

    That is the case for frozen units, and for those that were gathered after their update.
    """
    # what each slot is first given, and what it ends with
    first: dict[int, tuple[int, int]] = {}  # slot -> op, unit
    last: dict[int, tuple[int, bool]] = {}  # slot -> unit that it ends with, whether in the next step's version
    updated: set[int] = set()
    for index, op in enumerate(ops):
        if isinstance(op, Update):
            updated.update(unit for unit in op.units if op.part + 1 == trace.parts(unit))
        if isinstance(op, Gather):
            for unit, slot in zip(op.units, op.slots, strict=True):
                first.setdefault(slot, (index, unit))
                last[slot] = (unit, unit in updated or not trace.units[unit].trainable)
    needless = {(index, slot) for slot, (index, unit) in first.items() if last[slot] == (unit, True)}
    kept: list[Op] = []
    for index, op in enumerate(ops):
        if isinstance(op, Gather):
            pairs = [pair for pair in zip(op.units, op.slots, strict=True) if (index, pair[1]) not in needless]
            if not pairs:
                continue
            units, slots = zip(*pairs, strict=True)
            op = op._replace(units=units, slots=slots)
        kept.append(op)
    return kept


def begun_early(ops: Iterable[Op]) -> list[Op]:
    """Lets the forwards whose own backward is the next compute begin its gradients, where their slots are free."""
    out = list(ops)
    unreduced: set[int] = set()  # gradient slots
    last: tuple[int, Forward, set[int]] | None = None  # the forward before, and what held a gradient then
    for index, op in enumerate(out):
        if isinstance(op, Forward):
            last = (index, op, set(unreduced)) if op.keep else None
        elif isinstance(op, Backward):
            own = last is not None and last[1].visit == op.visit and last[1].microbatch == op.microbatch
            if last is not None and own and last[2].isdisjoint(op.grad_slots):
                out[last[0]] = last[1]._replace(early=op.grad_slots)
            unreduced.update(op.grad_slots)
            last = None
        elif isinstance(op, Reduce):
            unreduced.difference_update(op.grad_slots)
    return out


def readers(ops: Sequence[Op]) -> dict[int, int | None]:
    """Returns index of each gather -> that of the first compute that reads its slots; None if the step ends first."""
    found: dict[int, int | None] = {}
    following: dict[int, int] = {}  # slot -> the compute that reads it next
    for index, op in reversed([*enumerate(ops)]):
        if isinstance(op, ComputeOp):
            following.update(dict.fromkeys(op.slots, index))
        elif isinstance(op, Gather):
            found[index] = min((following.pop(slot) for slot in op.slots if slot in following), default=None)
    return found
