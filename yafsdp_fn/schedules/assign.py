"""Which unit lives in which slot: layers alternate among a few, everything else has a slot of its own.

A large embedding therefore does not make every slot large, and two slots are enough for any number of layers.
"""

from collections.abc import Container

from yafsdp_fn.schedules.trace import UnitSpec, Visit


def alternating_slots(
    visits: tuple[Visit, ...],
    units: tuple[UnitSpec, ...],
    *,
    width: int = 2,
    resident: int = 0,
    apart: Container[int] = (),
) -> dict[int, int]:
    """Unit -> slot: layers alternate among `width` slots, all others (and the last `resident` layers) have their own.

    Layers that one visit uses together are in different lanes of `width` slots; a layer for which no lane serves all
    of its visits has a slot of its own. apart: units that have slots of their own in any case
    """
    lane = _lanes(visits, units)
    lanes = max(lane.values(), default=-1) + 1
    slots: dict[int, int] = {}
    for k in range(lanes):
        members = [unit for unit in lane if lane[unit] == k]
        for index, unit in enumerate(members[: max(0, len(members) - resident)]):
            if unit not in apart:
                slots[unit] = k * width + index % width
    for visit in visits:
        taken: set[int] = set()
        for unit in visit.units:
            if unit in slots and slots[unit] in taken:
                del slots[unit]
            taken.add(slots.get(unit, -1))
    own = [unit.id for unit in units if unit.id not in slots]
    return slots | {unit: lanes * width + index for index, unit in enumerate(own)}


def _lanes(visits: tuple[Visit, ...], units: tuple[UnitSpec, ...]) -> dict[int, int]:
    """Layer -> lane, in the order of visits: that of its place in its stack, unless its neighbours have taken it."""
    lane: dict[int, int] = {}
    of_place: dict[tuple[str | None, int], int] = {}  # (stack, number among the visit's layers of that stack) -> lane
    for visit in visits:
        layers = [unit for unit in visit.units if units[unit].stack is not None]
        taken = {lane[unit] for unit in layers if unit in lane}
        stacks = [units[unit].stack for unit in layers]
        for index, unit in enumerate(layers):
            place = (stacks[index], stacks[:index].count(stacks[index]))
            if unit not in lane:
                lane[unit] = of_place.get(place, -1)
                if lane[unit] < 0 or lane[unit] in taken:
                    lane[unit] = next(k for k in range(len(layers)) if k not in taken)
                of_place.setdefault(place, lane[unit])
                taken.add(lane[unit])
    return lane


def own_slots(units: tuple[UnitSpec, ...]) -> dict[int, int]:
    """Unit -> slot: one each."""
    return {unit.id: unit.id for unit in units}
