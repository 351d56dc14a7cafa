"""What a stage must know of a step that is cut: what travels, and what stands for the outputs of visits elsewhere.

A visit that is elsewhere returns tensors of its outputs' shapes without values (fake tensors, made once). Code between
visits runs on them as on others. What it makes of them is elsewhere, too.
"""

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import round_up
from yafsdp_fn.engine.steps import INDEPENDENT
from yafsdp_fn.reductions import Max, Mean, Sum, is_reduction
from yafsdp_fn.schedules.split import Parcel
from yafsdp_fn.schedules.stages.cut import crossing
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.tracing.tracer import Traced

LINE = 16
"""Bytes that tensors are aligned to in a parcel."""


class Piece(NamedTuple):
    """A tensor of a parcel, and where it lies in it, in bytes. grad: whether it has a gradient that comes back"""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, a view of the parcel's bytes."""
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class StandIn(NamedTuple):
    """For the outputs of a visit: their structure, and tensors without values."""

    structure: Any
    tensors: list[Tensor]


class Crossing:
    """trace: the whole step, cut; place: `(visit, number of its argument)` -> `(flow, number of the piece)`

    stand_ins: by visit; aux: for each node of what the loss returns beside the total, the segment that makes it, None
    where every stage does, and the node without values; loss: the segment that makes the total
    """

    def __init__(self, trace: Trace, found: Traced) -> None:
        assert trace.split is not None
        self.trace, self.split = trace, trace.split
        self.stand_ins = [StandIn(structure, [x.detach() for x in tensors]) for structure, tensors in found.results]
        self.place: dict[tuple[int, int], tuple[int, int]] = {}
        self._pieces: list[list[Piece]] = []
        for flow, tensors in enumerate(crossing(trace)):
            start, pieces = 0, list[Piece]()
            for takers in tensors:
                self.place |= {(visit, argument.place): (flow, len(pieces)) for visit, argument in takers}
                a = takers[0][1]
                pieces.append(Piece(start, a.nbytes, a.shape, getattr(torch, a.dtype), bool(a.grad_bytes)))
                start += round_up(a.nbytes, LINE)
            self._pieces.append(pieces)
        if not trace.loss_of:
            raise ValueError(INDEPENDENT)
        self.loss = self.split.segment(trace.loss_of[0])
        self.total = found.total
        mean, nodes = _mean_and_nodes(found.out)
        self._home(mean, found.made, "the loss")
        self.aux = [self._home(node, found.made, "aux") for node in nodes]

    def pieces(self, parcel: Parcel) -> list[Piece]:
        """The tensors of a parcel; of one that comes back, those that have a gradient, where the values were."""
        return [piece for piece in self._pieces[parcel.flow] if piece.grad or not parcel.back]

    def nbytes(self, parcel: Parcel) -> int:
        """Bytes of a parcel, one way or the other."""
        return sum(round_up(piece.nbytes, LINE) for piece in self._pieces[parcel.flow])

    def _home(self, node: Any, made: dict[int, Any], what: str) -> tuple[int | None, Any]:
        visits = {visit for x in optree.tree_leaves(node) for visit in made.get(id(x), ())}
        segments = sorted({self.split.segment(visit) for visit in visits})
        if len(segments) > 1:
            raise ValueError(
                f"{what}: a leaf, or a mean and its weight, is made of what segments {segments} have made; it can be "
                "of one. Give what it needs through the visits"
            )
        if what == "aux" and segments and not is_reduction(node):
            raise ValueError(
                "aux: a leaf is made by visits that only one stage computes; wrap it in ya.Mean, ya.Sum or ya.Max, "
                f"which all stages get: {node!r}"
            )
        return (segments[0] if segments else None), node


def _mean_and_nodes(out: Any) -> tuple[Any, list[Any]]:
    """The loss, and the reductions and leaves of aux."""
    mean, aux = out if isinstance(out, tuple) and not isinstance(out, Mean) else (out, None)
    return mean, list(optree.tree_leaves(aux, is_leaf=is_reduction))


def neutral(node: Any, device: torch.device) -> Any:
    """What adds nothing to a reduction, of the shapes and dtypes of `node`, which has no values."""

    def filled(x: Any, value: float) -> Any:
        return torch.full(x.shape, value, dtype=x.dtype, device=device) if isinstance(x, Tensor) else value

    if isinstance(node, Max):
        dtype = node.value.dtype
        return Max(filled(node.value, -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min))
    assert isinstance(node, Mean | Sum)
    return type(node)(*[filled(x, 0) for x in node])


def shapes(tree: Any) -> Hashable:
    """Of the tensors of a batch: a step is cut anew for other ones."""
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in optree.tree_leaves(tree))
