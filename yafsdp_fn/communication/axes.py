"""Collectives in blocks and losses, over the axes of the mesh, as in `jax.lax`: psum, all_gather, all_to_all, ...

    def mlp(w, x):                                             # w.up [F / T, E], w.down [E, F / T]: a part of each
        return x + ya.psum(F.linear(F.silu(F.linear(x, w.up)), w.down), "tensor")

They act over the mesh of the sharded state whose loss is running. On plain tensors an axis has size 1 and all of them
are identities: the plain run is the oracle. `axis_name` is that of an axis inside blocks: `expert`, `context`,
`tensor`, or one of your own (`ya.mesh`). Arguments may be trees of tensors. All ranks of the axis call them in one
order. As in JAX, sums count bools as integers (int64, as torch's), and all else keeps its dtype: int8 wraps around.

The rule of gradients. The loss is sum of totals / sum of weights over all ranks, those that hold the same included:
both sums are then as many times too large, and the quotient is right. Each collective has its adjoint under the plain
sum over ranks of inner products, and the gradient of a leaf is summed over every axis that it is not split over:

    psum        itself                     all_to_all      all_to_all, the other way round
    all_gather  psum_scatter               ppermute        ppermute, by the inverse

In a step each is compared with what its visit called before (runtime/block_collectives.py). They run on the stream of
computes, on a communicator for each axis, and block it; on the CPU, the thread. A visit that is recomputed runs them
again. Autograd takes the nodes of a visit in the reverse order of their making, on every rank alike. torch.compile
calls them between two graphs.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.differentiable import Collective
from yafsdp_fn.communication.ranks import Axis, Rows
from yafsdp_fn.util.mesh_axes import INSIDE, OUTSIDE, AxisCollective
from yafsdp_fn.util.randomness import ranks_around, ranks_elsewhere
from yafsdp_fn.util.torch_private import graph_task_id, outside_graphs

IN_BACKWARD = (
    "in a backward pass (torch.utils.checkpoint, or an autograd.Function of your own): which mesh it acts over is not "
    "known there. Recompute by remat= of a schedule or ya.chunk, and take axis_size in the forward"
)

IN_THREAD = (
    "in a thread of its own, beside a step or function over {size} ranks of it: threads inherit no context, and which "
    "mesh it acts over is not known there. Call it in the thread that calls the block"
)

ALONE = Axis(1, 0)

Sizes = tuple[int, ...]
"""Lengths of the parts, one for each rank."""


def _axis(axis_name: str) -> tuple[Any, Axis]:
    """Returns the ranks of the state whose function is running, and its axis; ALONE where that is not on its mesh."""
    if not isinstance(axis_name, str) or axis_name in OUTSIDE:
        raise ValueError(
            f"axis_name={axis_name!r}: expected the name of one axis inside blocks, such as 'tensor'; sums over all "
            "ranks are made by the step itself, see ya.Mean, ya.Sum and ya.Max"
        )
    around = ranks_around()
    if around is None:
        if graph_task_id() != -1:
            raise RuntimeError(f"a collective over {axis_name!r} {IN_BACKWARD}")
        size = max((of.axes.get(axis_name, ALONE).size for of in ranks_elsewhere()), default=1)
        if size > 1:
            raise RuntimeError(f"a collective over {axis_name!r} {IN_THREAD.format(size=size)}")
    ranks: Any = None if around is None else around.ranks
    if ranks is None:
        return ranks, ALONE
    if axis_name not in (*INSIDE, *ranks.axes):
        raise ValueError(
            f"axis {axis_name!r} is not on this mesh, which has {', '.join(ranks.axes) or 'none'} inside blocks; give "
            f"it, of size 1 if nothing is split: ya.mesh({axis_name}=1)"
        )
    ranks.named.add(axis_name)
    return ranks, ranks.axes.get(axis_name, ALONE)


@outside_graphs
def axis_size(axis_name: str) -> int:
    """Returns the number of ranks on an axis: 1 on plain tensors, and where the mesh has not this one.

    >>> ya.axis_size("tensor")                                 # on plain tensors an axis has one rank
    1
    """
    return _axis(axis_name)[1].size


@outside_graphs
def axis_index(axis_name: str) -> int:
    """Returns this rank's index on an axis: a number of the host, not a tensor as in JAX.

    >>> ya.axis_index("tensor")                                # on plain tensors an axis has one rank
    0
    """
    return _axis(axis_name)[1].rank


# ---- The collectives, along the first axis of a tensor, for K ranks.
#
#     psum, pmax      [...] -> [...]            the sum, the maximum
#     all_gather      [n, ...] -> [K * n, ...]
#     psum_scatter    [K * n, ...] -> [n, ...]  the sum of this rank's parts
#     all_to_all      [K, ...] -> [K, ...]      row k goes to rank k
#     others          [sum of `sent`, ...] -> [sum of `received`, ...]: `sent[k]` rows go to rank k, `received[k]` come

REDUCTIONS = {"psum": dist.ReduceOp.SUM, "pmax": dist.ReduceOp.MAX}
RUNS: dict[str, Callable[[RankGroup, Tensor, Tensor], None]] = {
    "all_gather": lambda group, out, mine: group.all_gathers([out], [mine]),
    "psum_scatter": lambda group, out, mine: group.reduce_scatters([out], [mine]),
    "all_to_all": lambda group, out, mine: group.all_to_all(out, mine),
}
ADJOINTS = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}
"""Adjoints of other names; that of an exchange has `sent` and `received` the other way round."""


NO_DERIVATIVE = "pmax has no derivative, as in JAX: give it x.detach(), for a softmax, say, whose value it leaves alone"


@dataclasses.dataclass(frozen=True)
class _Along(Collective):
    """The collective `what` over the axis `name`. Nothing is computed on fake tensors, or, with `comms` None, on plain
    ones."""

    comms: Any
    name: str
    what: str
    sent: Sizes = ()
    received: Sizes = ()

    def run(self, values: Tensor) -> Tensor:
        ranks, x, name, what = self.comms, values, self.name, self.what
        if what in REDUCTIONS:
            out = x.clone(memory_format=torch.contiguous_format)
        elif self.sent:
            out = x.new_empty(sum(self.received), *x.shape[1:])
        else:
            size = ranks.axes[name].size
            out = x.new_empty(x.shape[0] * size if what == "all_gather" else x.shape[0] // size, *x.shape[1:])
        runs = isinstance(ranks, Communicators)
        if ranks is None or (runs and isinstance(out, FakeTensor)):
            return out  # what another stage has
        mine = x if what in REDUCTIONS else x.contiguous()  # here: a trace counts the copy, too
        rows: Rows = (self.sent, self.received) if self.sent and what != "all_to_all" else ()
        if runs:
            ranks.check()
        ended = None
        if ranks.called is not None:
            part = math.prod(x.shape[1:]) * x.itemsize  # of a ppermute, whether or not this rank sends
            ended = ranks.called(AxisCollective(name, what, max(x.nbytes, out.nbytes, part)), x, rows)
        if runs:
            parts = "" if not rows else f", rows to each rank {rows[0]}, from each {rows[1]}"
            with ranks.blocking(f"{what} over {name}{parts}"), torch.no_grad():
                group = ranks.along[name]
                if what in REDUCTIONS:
                    group.all_reduce(out, REDUCTIONS[what])
                elif rows:
                    group.exchange(_flat_rows(out, self.received), _flat_rows(mine, self.sent))
                else:
                    RUNS[what](group, out.view(-1), mine.view(-1))
        if ended is not None:
            ended()
        return out

    def gradient(self, grad: Tensor, dtype: torch.dtype, literal: bool) -> Tensor:
        if self.what == "pmax":
            raise NotImplementedError(NO_DERIVATIVE)
        return _Along(self.comms, self.name, ADJOINTS.get(self.what, self.what), self.received, self.sent)(grad)

    def derivative(self, tangent: Tensor) -> Tensor:
        if self.what == "pmax":  # on plain tensors, too
            raise NotImplementedError(NO_DERIVATIVE)
        return super().derivative(tangent)


def _flat_rows(values: Tensor, sizes: Sizes) -> list[Tensor]:
    return [part.flatten() for part in torch.split(values, list(sizes))]


# ---- The functions of `jax.lax`.


@outside_graphs
def psum(x: Any, axis_name: str) -> Any:
    """Sums over the axis, for all its ranks. A number counts once for each of them, and bools are counted, as int64;
    other dtypes stay, and small integers wrap around.

    x: a tensor, or a tree of tensors and numbers; axis_name: an axis of the mesh, inside blocks, such as "tensor"

    >>> def mlp(x, w):                                         # of each rank: rows of one matrix, columns of the other
    ...     return x + ya.psum(ya.linear(torch.relu(ya.linear(x, w["up"])), w["down"]), "tensor"), None
    >>> ya.scan(mlp, torch.ones(8), plain["layers"])[0].shape  # on plain tensors an axis has one rank
    torch.Size([8])
    """
    ranks, axis = _axis(axis_name)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf * axis.size
        leaf = _counted(leaf)
        return leaf if axis.size == 1 else _Along(ranks, axis_name, "psum")(leaf)

    return optree.tree_map(one, x)


@outside_graphs
def pmax(x: Any, axis_name: str) -> Any:
    """Takes the maximum over the axis, for all its ranks; of bools, whether any is true. Without a derivative, as in
    JAX: give it `x.detach()`.

    x: a tensor, or a tree of tensors; axis_name: as for `psum`

    >>> ya.pmax(torch.tensor([1.0, 2.0]), "tensor")            # on plain tensors an axis has one rank
    tensor([1., 2.])
    """
    ranks, axis = _axis(axis_name)
    return optree.tree_map(_Along(ranks if axis.size > 1 else None, axis_name, "pmax"), x)


@outside_graphs
def all_gather(x: Any, axis_name: str, *, axis: int = 0, tiled: bool = False) -> Any:
    """Puts the tensors of all ranks together, in their order, on a new axis [K] at place `axis`, or, `tiled`, one after
    the other along `axis`.

    x: a tensor, or a tree of tensors; axis_name: as for `psum`

    >>> ya.all_gather(torch.tensor([1.0, 2.0]), "tensor")      # on plain tensors an axis has one rank
    tensor([[1., 2.]])
    >>> ya.all_gather(torch.tensor([1.0, 2.0]), "tensor", tiled=True)
    tensor([1., 2.])
    """
    ranks, of = _axis(axis_name)

    def one(leaf: Tensor) -> Tensor:
        at = _dimension("all_gather: axis", axis, leaf.ndim + (not tiled))
        leaf = leaf if tiled else leaf.unsqueeze(at)
        if of.size == 1:
            return leaf
        return _Along(ranks, axis_name, "all_gather")(leaf.movedim(at, 0)).movedim(0, at)

    return optree.tree_map(one, x)


@outside_graphs
def psum_scatter(x: Any, axis_name: str, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """Sums over the axis, as `psum`, and keeps this rank's part along `scatter_dimension`: of K parts if `tiled`; else
    the dimension is K long, and goes.

    x: a tensor, or a tree of tensors; axis_name: as for `psum`

    >>> ya.psum_scatter(torch.tensor([1.0, 2.0]), "tensor", tiled=True)        # on plain tensors an axis has one rank
    tensor([1., 2.])
    """
    ranks, of = _axis(axis_name)

    def one(leaf: Tensor) -> Tensor:
        at = _dimension("psum_scatter: scatter_dimension", scatter_dimension, leaf.ndim)
        _must_fit("psum_scatter: scatter_dimension", leaf, at, axis_name, of.size, tiled)
        leaf = _counted(leaf)
        if of.size > 1:
            leaf = _Along(ranks, axis_name, "psum_scatter")(leaf.movedim(at, 0)).movedim(0, at)
        return leaf if tiled else leaf.squeeze(at)

    return optree.tree_map(one, x)


@outside_graphs
def all_to_all(
    x: Any,
    axis_name: str,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Any:
    """Sends part k along `split_axis` to rank k, and puts what comes from all ranks together along `concat_axis`.

    tiled: K equal parts of `split_axis`, one after the other along `concat_axis`. Else `split_axis` is K long and goes,
        and `concat_axis` is a new axis [K]
    split_sizes, concat_sizes: uneven parts, `tiled` and along one axis: the lengths that go to each rank, and those
        that come from it
    x: a tensor, or a tree of tensors; axis_name: as for `psum`

    >>> ya.all_to_all(torch.arange(4.0), "expert", 0, 0, tiled=True)           # on plain tensors an axis has one rank
    tensor([0., 1., 2., 3.])
    """
    ranks, of = _axis(axis_name)
    given = split_sizes, concat_sizes
    if given != (None, None):
        if None in given or not tiled or split_axis != concat_axis:
            raise ValueError(
                "all_to_all: uneven parts need both split_sizes and concat_sizes, tiled=True, and one axis to split "
                "and to concatenate"
            )
        if any(len(sizes or ()) != of.size for sizes in given):
            raise ValueError(
                f"all_to_all: expected {of.size} sizes each, one for each rank of {axis_name}, got {given}"
            )
    what = "all_to_all" if split_sizes is None else "uneven all_to_all"
    sent, received = (tuple(map(int, sizes)) if sizes is not None else (1,) * of.size for sizes in given)

    def one(leaf: Tensor) -> Tensor:
        at = _dimension("all_to_all: split_axis", split_axis, leaf.ndim)
        to = _dimension("all_to_all: concat_axis", concat_axis, leaf.ndim)
        if split_sizes is not None:
            if leaf.shape[at] != sum(sent):
                raise ValueError(
                    f"all_to_all: axis {at} of a tensor {tuple(leaf.shape)} is not as long as split_sizes={sent}"
                )
            moved = leaf.movedim(at, 0)
        else:
            _must_fit("all_to_all: split_axis", leaf, at, axis_name, of.size, tiled)
            parted = (*leaf.shape[:at], of.size, leaf.shape[at] // of.size, *leaf.shape[at + 1 :])
            moved = (leaf.reshape(parted) if tiled else leaf).movedim(at, 0)
        if of.size > 1:
            moved = _Along(ranks, axis_name, what, sent, received)(moved)
        moved = moved.movedim(0, to)
        return moved.flatten(to, to + 1) if tiled and split_sizes is None else moved

    return optree.tree_map(one, x)


@outside_graphs
def ppermute(x: Any, axis_name: str, perm: Sequence[tuple[int, int]]) -> Any:
    """Sends tensors along `perm`, pairs of ranks `(source, destination)`, each at most once on a side; a rank to which
    nothing is sent has zeros. A ring: `[(i, (i + 1) % n) for i in range(n)]`.

    x: a tensor, or a tree of tensors; axis_name: as for `psum`

    >>> size = ya.axis_size("context")
    >>> ya.ppermute(torch.tensor([1.0, 2.0]), "context", [(i, (i + 1) % size) for i in range(size)])
    tensor([1., 2.])
    """
    ranks, of = _axis(axis_name)
    sides = [list(side) for side in zip(*perm, strict=True)] or [[], []]
    if any(len(set(side)) < len(side) or not set(side) <= set(range(of.size)) for side in sides):
        raise ValueError(
            f"ppermute: perm={list(perm)}: expected pairs (source, destination) of ranks 0 to {of.size - 1} of "
            f"{axis_name}, each at most once on a side"
        )
    to = dict(perm)
    source = {b: a for a, b in perm}
    sent, received = (tuple(int(k == other.get(of.rank)) for k in range(of.size)) for other in (to, source))

    def one(leaf: Tensor) -> Tensor:
        if of.size > 1:
            mine = leaf.unsqueeze(0)[: sum(sent)]  # nothing, where nothing is sent
            found = _Along(ranks, axis_name, "ppermute", sent, received)(mine)
            return found[0] if sum(received) else found.sum(0, dtype=leaf.dtype)  # in the graph, too
        return leaf if perm else torch.zeros_like(leaf)

    return optree.tree_map(one, x)


def _counted(leaf: Tensor) -> Tensor:
    """Returns a tensor to sum: as bools, two of a kind would stay one."""
    return leaf.long() if leaf.dtype == torch.bool else leaf


def _dimension(argument: str, axis: int, ndim: int) -> int:
    """Returns an axis counted from 0. argument: of a function, for errors"""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{argument}={axis} of a tensor with {ndim} axes")
    return axis % ndim


def _must_fit(argument: str, leaf: Tensor, at: int, axis_name: str, size: int, tiled: bool) -> None:
    if leaf.shape[at] % size or (not tiled and leaf.shape[at] != size):
        wanted = f"a multiple of {size}" if tiled else f"{size}, or tiled=True"
        raise ValueError(
            f"{argument}={at} of a tensor {tuple(leaf.shape)} is {leaf.shape[at]} long; over {axis_name} it "
            f"should be {wanted}"
        )
