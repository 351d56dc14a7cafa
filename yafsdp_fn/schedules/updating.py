"""The order of the optimizer's step: units one by one, those of several parts one part a turn.

    update a, part 0; exchange a      update b, part 0; exchange b; update a, part 1; exchange a      ...

While the leaves of one unit travel to their owners, those of the unit before are worked on.
"""

from collections.abc import Iterable

from yafsdp_fn.schedules.further_ops import Exchange
from yafsdp_fn.schedules.ops import Norm, Op, Update
from yafsdp_fn.schedules.trace import Lent


class Updating:
    """open: unit between two parts of its update -> the next part"""

    def __init__(self, lent: Iterable[Lent]) -> None:
        self._parts = {of.unit: of.parts for of in lent}
        self.open: dict[int, int] = {}

    def turn(self, units: Iterable[int] = ()) -> tuple[list[Op], list[int]]:
        """Begins with `units`, and goes on by one part with those that were open: the ops, and what is done."""
        ops: list[Op] = []
        done: list[int] = []
        before = list(self.open)
        for unit in [*units, *before]:
            part = self.open.pop(unit, 0)
            ops.append(Update((unit,), part))
            if part + 1 == self._parts.get(unit, 1):
                done.append(unit)
            else:
                ops.append(Exchange((unit,), part))
                self.open[unit] = part + 1
        return ops, done


def after_program(trained: tuple[int, ...], lent: Iterable[Lent]) -> list[Op]:
    """The norm and the updates that follow a program without updates."""
    in_parts = [of.unit for of in lent]
    whole = tuple(unit for unit in trained if unit not in in_parts)
    ops: list[Op] = [Norm(trained), *[Update(whole)] * bool(whole or not in_parts)]
    updating = Updating(lent)
    for unit in in_parts:
        ops += updating.turn([unit])[0]
    while updating.open:
        ops += updating.turn()[0]
    return ops
