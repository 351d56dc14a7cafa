"""Flat shards of every group of a layout, and views of the leaves of a unit. Masters, gradients and moments are shards.

tensors[g]: [L, n] for a stack, [n] for an unstacked or a pinned unit
rows[unit]: view [n] of one unit, for units that this stage holds
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from yafsdp_fn.params.layout import FlatLayout, Group

# ---- Views of a unit.


class UnitViews(NamedTuple):
    """A flat vector of a unit, with views of its leaves, and of the gaps that belong to no leaf."""

    flat: Tensor
    leaves: list[Tensor]
    gaps: list[Tensor]


def views_of(layout: FlatLayout, flat: Tensor) -> UnitViews:
    return UnitViews(flat, layout.split(flat), layout.gaps(flat))


class GradSlot(NamedTuple):
    """The gradient slot of one trained unit. add: to its content"""

    views: UnitViews
    add: bool


# ---- Shards.


class Shards:
    """One tensor per group, and a view per unit. An absent group (a frozen one, in gradients) is None.

    present: the tensors of the groups that are not absent
    counted: the parts that sums over all ranks include: if several stages hold a unit, only the first counts it;
    counts: the units in it
    """

    def __init__(self, groups: Sequence[Group], tensors: Sequence[Tensor | None]) -> None:
        self.tensors = list(tensors)
        self.present = [tensor for tensor in tensors if tensor is not None]
        self.rows: dict[int, Tensor] = {}
        self.counted: list[Tensor] = []
        self._views: dict[int, UnitViews] = {}
        self._layouts = {unit: group.layout for group in groups for unit in group.units}
        for group, tensor in zip(groups, tensors, strict=True):
            if tensor is not None:
                # a single unit may be elsewhere: then it has no row here
                rows = tensor.unbind() if tensor.ndim == 2 else (tensor,) * len(group.held)
                self.rows.update(zip(group.held, rows, strict=True))
                if len(group.counted) == len(group.here):
                    self.counted.append(tensor)
                else:
                    self.counted += [rows[row] for row in group.counted]

    def views(self, unit: int) -> UnitViews:
        """Returns views of a unit. One rank only: the shard is the whole flat vector."""
        if unit not in self._views:
            self._views[unit] = views_of(self._layouts[unit], self.rows[unit])
        return self._views[unit]
