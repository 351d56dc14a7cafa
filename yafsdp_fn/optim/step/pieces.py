"""The step through a fused kernel, on the stretches of memory that it treats alike."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.optim.base import OnWrite, Scalar
from yafsdp_fn.optim.step.cutting import Cutter, rows
from yafsdp_fn.optim.step.fused import LARGE, Fusion, Launch, Leaves
from yafsdp_fn.optim.step.runs import Runs, leaf_runs, row_runs, split_runs
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree


class Piece(NamedTuple):
    """A stretch of elements of one leaf.

    large: whether it is of a large unit; tensors: its parameters, gradients and moments, and maybe copies
    """

    decays: bool
    large: bool
    tensors: list[Tensor]


class FusedSteps:
    """Through one kernel: leaves, or the rows of units, cut into runs that decay alike.

    chosen: the leaves that take the step, None for all
    """

    rounds = 0

    def __init__(self, fusion: Fusion, columns: Sequence[Leaves], params: Tree, chosen: LeafRule | None) -> None:
        self._fusion, self._columns, self.params, self._chosen = fusion, list(columns), params, chosen
        self._launch: Launch | None = None  # of the step under way
        self._whole: list[Piece] = []
        self._of_unit: dict[int, list[Piece]] = {}
        # the kernels read memory as it lies: autograd may give a transposed view, and a caller another dtype
        self._grads: Leaves = columns[1]
        self._as_read = all(g.dtype == p.dtype and g.is_contiguous() for p, g in zip(*columns[:2], strict=True))
        self._large = [numel >= LARGE for numel in _unit_numels(params)]

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        on_write()
        if self._launch is None:
            self._launch = self._fusion.begin()
        if not self._as_read:
            pairs = zip(self._columns[0], self._grads, strict=True)
            self._columns[1] = [grad.to(param.dtype).contiguous() for param, grad in pairs]
            self._whole, self._of_unit = [], {}
        if cutter is None or units is None:
            pieces = self._whole or self._join()
        else:
            of_unit = self._of_unit or self._cut(cutter)
            pieces = [piece for unit in units for piece in of_unit[unit]]
        for decays, large in itertools.product((True, False), (True, False)):
            of_kind = [piece.tensors for piece in pieces if (piece.decays, piece.large) == (decays, large)]
            self._launch(self._fusion.decay.weight_decay if decays else 0.0, large, of_kind, scale, found_inf)

    def _decays(self, path: str, param: Param) -> bool | None:
        """Whether a leaf decays; None where it takes no step."""
        if self._chosen is not None and not self._chosen(path, param):
            return None
        mask = self._fusion.decay.mask
        return mask is None or bool(mask(path, param))

    def _join(self) -> list[Piece]:
        runs = leaf_runs(self._decays, self.params)
        for of_leaf, large, leaves in zip(runs, self._large, zip(*self._columns, strict=True), strict=True):
            self._whole += _split(of_leaf, large, leaves)
        return self._whole

    def _cut(self, cutter: Cutter) -> dict[int, list[Piece]]:
        columns = zip(*self._columns, strict=True)
        for (group, handle), large, leaves in zip(cutter.leaves, self._large, columns, strict=True):
            runs = row_runs(self._decays, handle, group, leaves[0].shape[-1])
            for unit, *of_unit in zip(group.held, *(rows(group, leaf) for leaf in leaves), strict=True):
                self._of_unit[unit] = _split(runs, large, of_unit)
        return self._of_unit

    def finish(self, found_inf: Scalar) -> None:
        self._launch = None
        self._fusion.advance(found_inf)


def _unit_numels(params: Tree) -> list[int]:
    """Elements of the units of every leaf, over all ranks; of a plain leaf, its own."""
    out: list[int] = []
    for node in optree.tree_leaves(params, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            out += [group.layout.numel for _, group, _ in node.group_leaves()]
        else:
            out.append(node.numel())
    return out


def _split(runs: Runs, large: bool, leaves: Sequence[Tensor]) -> list[Piece]:
    pieces = zip(*(split_runs(leaf, runs) for leaf in leaves), strict=True)
    of_runs = zip(runs, pieces, strict=True)
    return [Piece(decays, large, list(piece)) for (decays, _), piece in of_runs if decays is not None]
