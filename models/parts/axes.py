"""Axes of the mesh inside a decoder's layers: tensor, sequence and context parallelism (docs/models.md).

    x = x + axes.added(attention(config, w, axes.every(norm(x)), at))      # one psum for each sublayer
    x = x + axes.added(mlp(w, axes.every(norm(x))))

On plain tensors, and on a mesh without these axes, each function here is the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models.parts.config import FieldError, Shape
from yafsdp_fn.util.torch_private import assert_async


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes that a model is computed over, as `params` and `loss` are told it. T, C: ranks of tensor and context."""

    tensor: bool = False
    """Heads, features of the feed-forward network and the vocabulary are split over `tensor`."""
    sequence: bool = False
    """Between sublayers a rank of `tensor` has S / T positions, so that it normalises and keeps no more. With `tensor`
    only."""
    context: bool = False
    """A rank of `context` has S / C positions, parts k and 2 C - 1 - k of 2 C: see `shard_batch`."""

    def __post_init__(self) -> None:
        if self.sequence and not self.tensor:
            raise ValueError("Axes(sequence=True): it is over the ranks of tensor; give tensor=True as well")

    @property
    def ranks(self) -> int:
        """T."""
        return ya.axis_size("tensor") if self.tensor else 1

    @property
    def options(self) -> dict[str, Axes]:
        """The argument of a family's `params`, where it needs it: those that split nothing have none."""
        return {"axes": self} if self.tensor else {}

    def must_not_split(self) -> None:
        """Raises NotImplementedError with `tensor`: of a family whose weights have no `split`."""
        if self.tensor:
            raise NotImplementedError(
                "Axes(tensor=True): weights of this family are not split over tensor; llama, qwen3 and mistral are. "
                "Leave it out; context=True is for all"
            )

    def split(self, dim: int) -> Mapping[str, int]:
        """Returns the `split` of a `ya.Param` that `tensor` cuts along `dim`."""
        return {"tensor": dim} if self.tensor else {}

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

    def places(self, first: int, end: int, device: torch.device) -> Int[Tensor, " S"]:
        """Returns the positions in the whole sequence of this rank's tokens first .. end - 1."""
        return places(end - first, device) if self.context else torch.arange(first, end, device=device)

    def check(self, config: Shape, length: int, ranks: int | None = None) -> None:
        """Raises ValueError unless a model and sequences of this length, a rank's own, can be split over `tensor`.
        ranks: T; None: of the mesh"""
        ranks = self.ranks if ranks is None else ranks
        if ranks == 1:
            return
        for field in ("heads", "kv_heads", "ffn", "vocab"):
            if (value := getattr(config, field)) % ranks:
                raise FieldError(config, field, f"{value} do not divide among {ranks} ranks of tensor; take fewer")
        if self.sequence and length % ranks:
            raise ValueError(
                f"sequences of {length} positions on a rank do not divide among {ranks} ranks of tensor "
                "(Axes.sequence); take another length, or sequence=False"
            )

    def must_have(self, what: str, found: int, width: int) -> None:
        """Raises ValueError unless a rank's weights have 1 / T of this width: those of the same `Axes`."""
        if found * self.ranks != width:
            raise ValueError(
                f"{what}: this rank's weights have {found} of {width} rows or columns, and the model is computed over "
                f"{self.ranks} ranks of tensor; give params and loss the same axes=Axes(tensor=...)"
            )

    def shard_batch(self, batch: Any, mesh: DeviceMesh) -> Any:
        """Returns this rank's part of a global batch as `ya.shard_batch` does it, sequences dealt over `context`."""
        return ya.shard_batch(batch, mesh, split={"context": 1} if self.context else None, zigzag=self.context)


NONE = Axes()


def starts(length: int, rank: int) -> tuple[int, int]:
    """Returns the positions at which the two parts begin that a rank of `context` has, of `length` positions in all."""
    half = length // 2
    return rank * half, (2 * ya.axis_size("context") - 1 - rank) * half


def places(length: int, device: torch.device) -> Int[Tensor, " S"]:
    """Returns the positions in the whole sequence of the `length` tokens that this rank of `context` has."""
    half = torch.arange(length // 2, device=device)
    return torch.cat([half + start for start in starts(length, ya.axis_index("context"))])


def in_order(x: Int[Tensor, "B s"]) -> Int[Tensor, "B S"]:
    """Puts the tensors of all ranks of `context` together, by position."""
    parts: Tensor = ya.all_gather(x.view(len(x), 2, -1), "context", axis=0)  # [C, B, 2, s / 2]
    return torch.cat([*parts[:, :, 0], *parts[:, :, 1].flip(0)], 1)


# ---- The vocabulary over `tensor`: rank k has rows k V / T .. (k + 1) V / T - 1 of a matrix [V, E].


def _own(ids: Int[Tensor, "*B"], rows: int) -> tuple[Int[Tensor, "*B"], Tensor]:
    """Returns the numbers of ids among this rank's rows, 0 for others', and which are its own."""
    every = ya.axis_size("tensor") * rows
    assert_async(((ids >= 0) & (ids < every)).all(), f"a token or target is out of bounds: expected 0 to {every - 1}")
    at = ids - ya.axis_index("tensor") * rows
    here = (at >= 0) & (at < rows)
    return at.where(here, 0), here


def own_rows(tokens: Int[Tensor, "B S"], matrix: Float[Tensor, "v E"]) -> Float[Tensor, "B S E"]:
    """Looks the tokens up that are among this rank's rows; zeros for the others."""
    at, here = _own(tokens, len(matrix))
    return ya.embedding(at, matrix).where(here[..., None], 0)


LOGITS = 256 << 20
"""Bytes of logits, in the dtype of the softmax, that a rank holds at once."""


def cross_entropy(
    x: Float[Tensor, "B S E"], matrix: Float[Tensor, "v E"], targets: Int[Tensor, "B S"], *, nbytes: int = LOGITS
) -> Tensor:
    """Computes `ya.linear_cross_entropy` with this rank's rows of the head: no rank has all logits of a position.

    Rows are taken in chunks of at most `nbytes` of logits, which the backward computes again if there are several.
    """
    rows, labels = x.flatten(0, 1), targets.flatten()
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
    both = ya.psum(torch.stack([scores.exp().sum(-1), chosen]), "tensor")
    return ya.Sum((both[0].log() - both[1]).where(counts, 0).sum())
