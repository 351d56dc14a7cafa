"""Axes of the mesh inside a decoder's layers: tensor, sequence, context and expert parallelism (docs/models.md).

    x = x + axes.added(attention(config, w, axes.every(norm(x)), at))      # one psum for each sublayer
    x = x + axes.added(mlp(w, axes.every(norm(x))))

On plain tensors, and on a mesh without these axes, each function here is the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models.parts.config import FieldError, Shape
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.util.randomness import acting_over
from yafsdp_fn.util.torch_private import assert_async


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes that a model is computed over, as `params` and `loss` are told it. T, C, P: ranks of tensor, context and
    expert."""

    tensor: bool = False
    """Heads, features of the feed-forward network and the vocabulary are split over `tensor`."""
    sequence: bool = False
    """Between sublayers a rank of `tensor` has S / T positions, so that it normalises and keeps no more. With `tensor`
    only."""
    context: bool = False
    """A rank of `context` has S / C positions, parts k and 2 C - 1 - k of 2 C: see `shard_batch`."""
    expert: bool = False
    """A rank of `expert` has X / P experts of each layer, and rows of its own, whose tokens go to their experts."""

    def __post_init__(self) -> None:
        if self.sequence and not self.tensor:
            raise ValueError("Axes(sequence=True): it is over the ranks of tensor; give tensor=True as well")

    @property
    def ranks(self) -> int:
        """T."""
        return self._ranks("tensor")

    @property
    def options(self) -> dict[str, Axes]:
        """The argument of a family's `params`, where it needs it: those that split nothing have none."""
        return {"axes": self} if self.tensor or self.expert else {}

    def must_split(self, *splits: str) -> None:
        """Raises NotImplementedError for `tensor` or `expert` of a family whose weights are not split over it."""
        for name in ("tensor", "expert"):
            if getattr(self, name) and name not in splits:
                raise NotImplementedError(
                    f"Axes({name}=True): weights of this family are not split over {name}; those of "
                    f"{'all models.FAMILIES' if name == 'tensor' else 'mixtral'} are. Leave it out; context=True is "
                    "for all"
                )

    def split(self, dim: int, blocks: int = 1) -> dict[str, Any]:
        """Returns a `split` for `ya.Param`: the axis `tensor` cuts each of `blocks` equal blocks along `dim`."""
        return {"tensor": dim if blocks == 1 else (dim, blocks)} if self.tensor else {}

    def of_experts(self, split: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the `split` of all experts' matrices [L, X, O, I], where `split` is that of one expert's."""
        return {**split, "expert": -3} if self.expert else dict(split)

    def every(self, x: Float[Tensor, "B s E"]) -> Float[Tensor, "B S E"]:
        """Puts the positions of a sublayer's input together, s = S / T with sequence parallelism."""
        if not self.sequence:
            return x
        whole: Tensor = ya.all_gather(x, "tensor", axis=1, tiled=True)
        return whole.contiguous()  # once; else each product copies it, and keeps its copy

    def added(self, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B s E"]:
        """Adds up what ranks of `tensor` have computed with their parts of the weights."""
        if self.sequence:
            x = ya.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        elif self.tensor:
            x = ya.psum(x, "tensor")
        return x

    def exchanged(self, x: Tensor, split_axis: int, concat_axis: int, **sizes: Any) -> Tensor:
        """Runs `ya.all_to_all` over `expert`; nothing where experts are not split."""
        if not self.expert:
            return x
        out: Tensor = ya.all_to_all(x, "expert", split_axis, concat_axis, tiled=True, **sizes)
        return out

    def own(self, x: Float[Tensor, "*B S E"]) -> Float[Tensor, "*B s E"]:
        """Returns this rank's positions of what all ranks of `tensor` have, as `added` leaves them."""
        return x.chunk(self.ranks, -2)[ya.axis_index("tensor")] if self.sequence else x

    def places(self, first: int, end: int, device: torch.device) -> Int[Tensor, " S"]:
        """Returns the positions in the whole sequence of this rank's tokens first .. end - 1."""
        return places(end - first, device) if self.context else torch.arange(first, end, device=device)

    def check(self, config: Shape, length: int, sizes: Mapping[str, int] | None = None) -> None:
        """Raises ValueError unless a model and sequences of this length, a rank's own, can be split over `tensor` and
        `expert`. sizes: of these axes; None: of the mesh"""
        for axis, fields in (("tensor", ("heads", "kv_heads", "ffn", "vocab")), ("expert", ("experts",))):
            ranks = self._ranks(axis) if sizes is None else sizes.get(axis, 1)
            for field in fields:
                if (value := getattr(config, field, 0)) % ranks:  # 0: a field that this family has not
                    raise FieldError(config, field, f"{value} do not divide among {ranks} ranks of {axis}; take fewer")
            if axis == "tensor" and self.sequence and length % ranks:
                raise ValueError(
                    f"sequences of {length} positions on a rank do not divide among {ranks} ranks of tensor "
                    "(Axes.sequence); take another length, or sequence=False"
                )

    def _ranks(self, axis: str) -> int:
        return ya.axis_size(axis) if getattr(self, axis) else 1

    def must_have(self, what: str, found: int, width: int, axis: str = "tensor") -> None:
        """Raises ValueError unless a rank's weights have a part of this width for each rank of `axis`: those of the
        same `Axes`."""
        if found * (ranks := self._ranks(axis)) != width:
            raise ValueError(
                f"{what}: this rank's weights have {found} of {width} rows or columns, and the model is computed over "
                f"{ranks} ranks of {axis}; give params and loss the same axes=Axes({axis}=...)"
            )

    def shard_batch(self, batch: Any, mesh: DeviceMesh) -> Any:
        """Returns this rank's part of a global batch as `ya.shard_batch` does it, sequences split over `context`, with
        the `places` of its tokens."""
        if self.context and isinstance(batch, Mapping) and "tokens" in batch:
            tokens = batch["tokens"]
            batch = {**batch, "places": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)}
        return ya.shard_batch(batch, mesh, split={"context": 1} if self.context else None, zigzag=self.context)

    def must_be_dealt(self, batch: Mapping[str, Any]) -> None:
        """Raises ValueError, or for other places RuntimeError, unless a batch has the tokens of this rank of
        `context`."""
        if not self.context or ya.axis_size("context") == 1 or isinstance(batch["tokens"], FakeTensor):
            return  # a plan has shapes alone
        if "places" not in batch:
            raise ValueError(
                "the batch has no `places`, so that nothing says which part of its sequences this rank of context has; "
                "split it with axes.shard_batch(batch, mesh), of the loss' axes"
            )
        here = batch["places"]
        assert_async(
            (here == places(here.shape[1], here.device)).all(),
            "places in the batch are not those of this rank of context: split it with axes.shard_batch(batch, mesh)",
        )


NONE = Axes()


def acting_on(params: Any) -> AbstractContextManager[None]:
    """Lets collectives act over the mesh of these parameters, also outside of a step."""
    found = handles(params)
    return acting_over(found[0].owner.comms) if found else nullcontext()


def starts(length: int, rank: int) -> tuple[int, int]:
    """Returns the positions at which the two parts begin that a rank of `context` has, of `length` positions in all."""
    half = length // 2
    return rank * half, (2 * ya.axis_size("context") - 1 - rank) * half


def places(length: int, device: torch.device) -> Int[Tensor, " S"]:
    """Returns the positions in the whole sequence of the `length` tokens that this rank of `context` has."""
    half = torch.arange(length // 2, device=device)
    return torch.cat([half + start for start in starts(length, ya.axis_index("context"))])


def in_order(x: Shaped[Tensor, "B s *rest"]) -> Shaped[Tensor, "B S *rest"]:
    """Puts the tensors of all ranks of `context` together, by position."""
    parts: Tensor = ya.all_gather(torch.unflatten(x, 1, (2, -1)), "context", axis=0)  # [C, B, 2, s / 2, ...]
    return torch.cat([*parts[:, :, 0], *parts[:, :, 1].flip(0)], 1)


def counted_before(marks: Int[Tensor, "B S X"], axes: Axes) -> Int[Tensor, "B S X"]:
    """Sums the marks at earlier positions of the whole sequence."""
    if not axes.context:
        return marks.cumsum(1) - marks
    halves = torch.unflatten(marks, 1, (2, -1))  # [B, 2, S / 2, X]
    sums, me = in_order(halves.sum(2)), ya.axis_index("context")  # [B, 2 C, X]
    earlier = (sums.cumsum(1) - sums)[:, [me, -1 - me]]
    return (halves.cumsum(2) - halves + earlier[:, :, None]).view_as(marks)


# ---- The vocabulary over `tensor`: rank k has rows k V / T .. (k + 1) V / T - 1 of a matrix [V, E].


def _own(ids: Int[Tensor, "*B"], rows: int) -> tuple[Int[Tensor, "*B"], Tensor]:
    """Returns the numbers of ids among this rank's rows, 0 for others', and which are its own."""
    every = ya.axis_size("tensor") * rows
    assert_async(((ids >= 0) & (ids < every)).all(), f"a token or target is out of bounds: expected 0 to {every - 1}")
    at = ids - ya.axis_index("tensor") * rows
    here = (at >= 0) & (at < rows)
    return at.where(here, 0), here


def rows_of(matrix: Float[Tensor, "v E"], tokens: Int[Tensor, "B S"], axes: Axes) -> Float[Tensor, "B s E"]:
    """Looks up the tokens' rows: over `tensor` each rank those that it has, and they are added."""
    if not axes.tensor:
        return ya.embedding(tokens, matrix)
    at, here = _own(tokens, len(matrix))
    return axes.added(ya.embedding(at, matrix).where(here[..., None], 0))


LOGITS = 256 << 20
"""Bytes of logits, in the dtype of the softmax, that a rank holds at once."""


def cross_entropy(
    x: Float[Tensor, "B S E"], matrix: Float[Tensor, "v E"], targets: Int[Tensor, "B S"], *, nbytes: int = LOGITS
) -> Tensor:
    """Computes `ya.linear_cross_entropy` with this rank's rows of the head: no rank has all logits of a position.

    Rows are taken in chunks of at most `nbytes` of logits, which the backward computes again if there are several.
    """
    rows = x.flatten(0, 1)
    labels = targets.flatten()
    wanted = max(1, -(-len(rows) * len(matrix) * max(4, x.dtype.itemsize) // nbytes))
    chunks = next(n for n in range(min(wanted, len(rows)), len(rows) + 1) if len(rows) % n == 0) if len(rows) else 1
    total: Tensor = ya.chunk(_cross_entropy, chunks, in_axes=(0, None, 0))(rows, matrix, labels).value
    return total


def _cross_entropy(x: Float[Tensor, "N E"], matrix: Float[Tensor, "v E"], targets: Int[Tensor, " N"]) -> ya.Sum:
    scores = ya.linear(x, matrix).to(torch.promote_types(x.dtype, torch.float32))
    top = ya.pmax(scores.detach().amax(-1), "tensor")
    scores = scores - top[:, None]
    counts = targets != -100
    at, here = _own(targets.where(counts, 0), len(matrix))
    chosen = scores.gather(1, at[:, None])[:, 0].where(here, 0)
    found = (here & counts).to(scores.dtype)
    sums = ya.psum(torch.stack([scores.exp().sum(-1), chosen, found]), "tensor")
    assert_async(
        (sums[2] == counts).all(),
        "ranks of tensor have other targets, and must have the same batch: split it with axes.shard_batch(batch, mesh)",
    )
    return ya.Sum((sums[0].log() - sums[1]).where(counts, 0).sum())
