"""Builds a program from a fixed assignment of units to slots; collectives that are waited for together are one op."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Literal

from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Forward, Gather, Norm, Op, Reduce, Stash
from yafsdp_fn.program.program import Program, update_turns
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


def visited(trace: Trace) -> list[int]:
    """Returns the units that visits use, in the order of their first visits."""
    return list(dict.fromkeys(unit for visit in trace.visits for unit in visit.units))


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
    updates = update and trace.trains
    builder = _Builder(trace, slots, grad_slots, prefetch, deferred, secondary, updates)
    recompute = remat(trace)
    for i, now in enumerate(trace.order):
        builder.gather(i)
        builder.ops.append(op_of(now, trace, slots, grad_slots, recompute))
        if now.kind != "forward":
            builder.reduce(i, now)
    builder.ops += sums_over_stages(trace)
    if updates:
        builder.finish()
    ops = begun_early(builder.ops)
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
    """The ops so far, and what is gathered when: as early as `prefetch` and the slots allow, in the order of computes.

    due: compute before which to gather -> compute for which -> units, which are gathered together
    kept: frozen units that stay in their slots from step to step
    ahead: units that the step before has gathered after their updates, and that this one gathers for the next
    stashed: units that are gathered inside the node from now on
    """

    trace: Trace
    slots: Mapping[int, int]
    grad_slots: Mapping[int, int]
    prefetch: int
    deferred: Container[int]
    secondary: Container[int]
    updates: bool

    def __post_init__(self) -> None:
        self.ops: list[Op] = []
        # gathers
        self.due: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.times: Counter[int] = Counter()  # unit -> gathers of it
        first, last = self._plan()
        self.kept = {u for slot, u in first.items() if last[slot] == u and not self.trace.units[u].trainable}
        begin = {unit for units in self.due[0].values() for unit in units}
        self.ahead = begin - self.kept if self.updates else set[int]()
        self.held = self.kept | self.ahead  # units that the first gather would find in their slots
        self.stashed: set[int] = set()
        # gradients
        self.last_write = {unit: i for i, now in enumerate(self.trace.order) for unit in writes_of(now, self.trace)}
        used = list(self.grad_slots.values())
        self.shared = {slot for slot in used if used.count(slot) > 1}

    def _plan(self) -> tuple[dict[int, int], dict[int, int]]:
        """Finds when to gather each unit. Returns slot -> the unit that is put into it first, and the last one."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        free: dict[int, int] = {}  # slot -> the compute before which it can be filled: the one after its last reader
        at = 0
        for number, compute in enumerate(self.trace.order):
            for unit in reads_of(compute, self.trace):
                slot = self.slots[unit]
                if last.get(slot) != unit:
                    at = max(at, number - self.prefetch, free.get(slot, 0))
                    self.due[at][number].append(unit)
                    self.times[unit] += 1
                    first.setdefault(slot, unit)
                    last[slot] = unit
                free[slot] = number + 1
        return first, last

    # ---- the ops of a compute

    def gather(self, i: int) -> None:
        """Gathers what is due before compute `i`, and stashes what is gathered inside the node from now on."""
        for units in self.due[i].values():
            in_node = [unit for unit in units if unit in self.stashed]
            from_all = [unit for unit in units if unit not in self.stashed]
            self._gather_together([unit for unit in from_all if unit not in self.held], "shard")
            self.held.difference_update(units)
            for unit in from_all:
                if unit in self.secondary and self.times[unit] > 1:
                    self.ops.append(Stash((unit,), (self.slots[unit],)))
                    self.stashed.add(unit)
            self._gather_together(in_node, "node")

    def _gather_together(self, units: Sequence[int], source: Literal["shard", "node"]) -> None:
        if units:
            self.ops.append(Gather(tuple(units), tuple(self.slots[unit] for unit in units), source))

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

    # ---- the end of the step

    def finish(self) -> None:
        """The norm, the updates in the order in which the next step visits their units, and its first gathers."""
        if self.trace.update_when == "never":
            raise ValueError("update=True: this step has no optimizer to put into the program; it is for ya.train_step")
        if self.trace.trained:
            self.ops.append(Norm(self.trace.trained))
        counts: dict[int, int] = {}  # unit -> parts of its update
        for unit in (*visited(self.trace), *range(len(self.trace.units))):
            counts[unit] = self.trace.parts(unit) if self.trace.units[unit].trainable else 0
        for ops, done in update_turns(counts):
            self.ops += ops
            for unit in done:
                if unit in self.ahead:
                    self._gather_together([unit], "shard")


# ---- Passes over a program.


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
