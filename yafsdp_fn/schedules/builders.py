"""Schedules: factories of functions from a trace to a program.

    for each compute of the trace:
        gather, into free slots, what this compute and the next `prefetch` ones need
        compute
        reduce the gradients that are complete

Two layer slots alternate; units outside a stack have slots of their own, so that a large embedding does not make
every slot large. All that these schedules decide is which unit lives in which slot, and how far ahead to gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from yafsdp_fn.schedules import remat as remat_policies
from yafsdp_fn.schedules.program import Backward, Forward, Gather, Op, Program, Reduce
from yafsdp_fn.schedules.remat import Remat
from yafsdp_fn.schedules.trace import Compute, Trace, Unit, Visit

Schedule = Callable[[Trace], Program]


def zero3(*, resident: int = 0, prefetch: int = 1, remat: Remat = remat_policies.none) -> Schedule:
    """ZeRO-3 with YaFSDP's two alternating slots: weights are gathered for forward and again for backward.

        gather   | e 0 1 2 3 h |     1 0    |          each layer: forward once, backward once, but the last two
        compute  |   e 0 1 2 3 h h 3 2 1 0 e|
        reduce   |               h 3 2 1 0 e|

    L layers take max(L, 2L - 2) gathers: the last two still hold their slots when backward begins. Every further
    microbatch takes two fewer, since its first two layers are still there.

    resident: the last `resident` layers get slots of their own, and are gathered once per step instead of twice per
        microbatch: memory for communication, up to `zero2`
    prefetch: how many computes ahead to gather; 0 gathers when needed, k > 1 takes k + 1 alternating slots
    remat: which visits recompute, see `remat`
    """
    _check("zero3", resident=resident, prefetch=prefetch)

    def build_zero3(trace: Trace) -> Program:
        slots = alternating_slots(trace.visits, trace.units, width=max(2, prefetch + 1), resident=resident)
        return build(trace, slots, alternating_slots(trace.visits, trace.units), prefetch=prefetch, remat=remat)

    return build_zero3


def zero2(*, prefetch: int = 2, remat: Remat = remat_policies.none) -> Schedule:
    """ZeRO-2: each unit has a slot of its own and is gathered once per step; gradients are reduced every microbatch.

        gather   | e 0 1 2 3 h |
        compute  |   e 0 1 2 3 h h 3 2 1 0 e|
        reduce   |               h 3 2 1 0 e|

    Needs room for all weights in the compute dtype; gradients still alternate between two slots.
    """
    _check("zero2", prefetch=prefetch)

    def build_zero2(trace: Trace) -> Program:
        slots = {unit.id: unit.id for unit in trace.units}
        return build(trace, slots, alternating_slots(trace.visits, trace.units), prefetch=prefetch, remat=remat)

    return build_zero2


def _check(factory: str, **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{factory}({name}={value!r}): expected an integer >= 0")


def alternating_slots(
    visits: tuple[Visit, ...], units: tuple[Unit, ...], *, width: int = 2, resident: int = 0
) -> dict[int, int]:
    """Unit -> slot: layers alternate among `width` slots, all others (and the last `resident` layers) have their own.

    Layers that one visit uses together are in different lanes of `width` slots; a layer for which no lane serves all
    of its visits has a slot of its own.
    """
    lane = _lanes(visits, units)
    lanes = max(lane.values(), default=-1) + 1
    slots: dict[int, int] = {}
    for k in range(lanes):
        members = [unit for unit in lane if lane[unit] == k]
        for index, unit in enumerate(members[: max(0, len(members) - resident)]):
            slots[unit] = k * width + index % width
    for visit in visits:
        taken: set[int] = set()
        for unit in visit.units:
            if unit in slots and slots[unit] in taken:
                del slots[unit]
            taken.add(slots.get(unit, -1))
    own = [unit.id for unit in units if unit.id not in slots]
    return slots | {unit: lanes * width + index for index, unit in enumerate(own)}


def _lanes(visits: tuple[Visit, ...], units: tuple[Unit, ...]) -> dict[int, int]:
    """Layer -> lane, in the order of visits: that of its place in its stack, unless its neighbours have taken it."""
    lane: dict[int, int] = {}
    of_place: dict[tuple[str | None, int], int] = {}  # (stack, number among the visit's layers of that stack) -> lane
    for visit in visits:
        layers = [unit for unit in visit.units if units[unit].stack is not None]
        taken = {lane[unit] for unit in layers if unit in lane}
        seen: dict[str | None, int] = {}
        for unit in layers:
            stack = units[unit].stack
            place = (stack, seen.setdefault(stack, 0))
            seen[stack] += 1
            if unit not in lane:
                lane[unit] = of_place.get(place, -1)
                if lane[unit] < 0 or lane[unit] in taken:
                    lane[unit] = next(k for k in range(len(layers)) if k not in taken)
                of_place.setdefault(place, lane[unit])
                taken.add(lane[unit])
    return lane


def build(
    trace: Trace, slots: Mapping[int, int], grad_slots: Mapping[int, int], *, prefetch: int, remat: Remat
) -> Program:
    """The program of a fixed assignment of units to weight slots and gradient slots."""
    ops: list[Op] = []
    held: dict[int, int] = {}  # slot -> unit
    recompute = remat(trace)
    shared = {slot for slot in grad_slots.values() if list(grad_slots.values()).count(slot) > 1}
    for i, now in enumerate(trace.order):
        ops += _gathers(trace, trace.order[i : i + prefetch + 1], slots, held)
        visit = trace.visits[now.visit]
        at = tuple(slots[unit] for unit in visit.units)
        if now.kind == "forward":
            ops.append(Forward(visit.id, at, keep=visit.id not in recompute))
            continue
        ops.append(Backward(visit.id, at, tuple(grad_slots[unit] for unit in visit.trained)))
        after = trace.order[i + 1] if i + 1 < len(trace.order) else None
        following = trace.visits[after.visit].trained if after and after.kind == "backward" else ()
        for unit in visit.trained:
            # a shared slot must be free before another unit's gradient arrives, complete or not
            if unit in now.closes or (grad_slots[unit] in shared and unit not in following):
                ops.append(Reduce((unit,), (grad_slots[unit],)))
    return Program(trace, tuple(ops))


def _gathers(trace: Trace, window: tuple[Compute, ...], slots: Mapping[int, int], held: dict[int, int]) -> list[Op]:
    """Gathers for the computes of `window`, up to the first whose slot an earlier one of the window still reads."""
    ops: list[Op] = []
    busy: set[int] = set()
    for compute in window:
        for unit in trace.visits[compute.visit].units:
            slot = slots[unit]
            if held.get(slot) != unit:
                if slot in busy:
                    return ops
                ops.append(Gather((unit,), (slot,)))
                held[slot] = unit
            busy.add(slot)
    return ops
