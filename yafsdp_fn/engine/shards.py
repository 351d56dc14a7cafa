"""Flat shards of every group of a layout: masters, gradients, moments all have this shape.

tensors[g]: [L, n] for a stack, [n] for an unstacked or a pinned unit
rows[unit]: the [n] of one unit, a view; of those that this stage holds
"""

from collections.abc import Sequence

from torch import Tensor

from yafsdp_fn.params.layout import Group


class Shards:
    """One tensor per group, and a view per unit. A group that is absent (a frozen one, of gradients) is None.

    present: the tensors of the groups that are not absent
    counted: what of them sums over all ranks are of: where several stages hold a unit, the first one counts it;
        counts: the units in it
    """

    def __init__(self, groups: Sequence[Group], tensors: Sequence[Tensor | None]) -> None:
        self.tensors = list(tensors)
        self.present = [tensor for tensor in tensors if tensor is not None]
        self.rows: dict[int, Tensor] = {}
        self.counted: list[Tensor] = []
        self.counts: set[int] = set()
        self._leaves: dict[int, list[Tensor]] = {}
        self._gaps: dict[int, list[Tensor]] = {}
        self._layouts = {unit: group.layout for group in groups for unit in group.units}
        for group, tensor in zip(groups, tensors, strict=True):
            if tensor is not None:
                rows = tensor.unbind() if tensor.ndim == 2 else (tensor,) * len(group.held)
                self.rows.update(zip(group.held, rows, strict=True))
                all_count = len(group.counted) == len(group.here)
                self.counts.update(group.held[row] for row in group.counted)
                self.counted += [tensor] if all_count else [rows[row] for row in group.counted]

    def divide_(self, divisor: Tensor) -> None:
        for tensor in self.present:
            tensor.div_(divisor)

    def leaves(self, unit: int) -> list[Tensor]:
        """Views of a unit's leaves; where there is one rank, a shard is the whole flat vector."""
        if unit not in self._leaves:
            self._leaves[unit] = self._layouts[unit].split(self.rows[unit])
        return self._leaves[unit]

    def gaps(self, unit: int) -> list[Tensor]:
        """Views of what belongs to no leaf, likewise."""
        if unit not in self._gaps:
            self._gaps[unit] = self._layouts[unit].gaps(self.rows[unit])
        return self._gaps[unit]
