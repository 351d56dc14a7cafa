"""A small model that uses every axis: heads and features over `tensor`, sequences over `context`, experts over
`expert`.

On plain tensors it is the plain model: the oracle.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya

E, H, D, FF, V, L, S, X = 16, 4, 4, 32, 24, 2, 8, 4  # see docs/design.md; X: experts
ROWS = 4

Batch = dict[str, Tensor]


class Options(NamedTuple):
    """sequence_parallel: norms and residuals over `tensor`; tied: the head is the embedding, not split; zigzag: how
    sequences are split over `context`; frozen: some leaves are not trained; unroll: layers of a visit; dropout: of what
    attention adds, and of features of experts"""

    sequence_parallel: bool = False
    tied: bool = False
    zigzag: bool = False
    frozen: bool = False
    unroll: int = 1
    dropout: float = 0.0


PLAIN = Options()


@functools.lru_cache(3)
def mesh_of(**axes: int) -> Any:
    """A mesh of this process; making one takes longer than most tests."""
    return ya.mesh(device="cpu", **axes)


def params(of: Options = PLAIN) -> dict[str, Any]:
    draw = {"init": ya.params.initializers.normal(0.3), "dtype": torch.float64}
    fixed = ya.frozen if of.frozen else lambda leaf: leaf
    layer = {
        "attention_norm": ya.Param((L, E), **draw),
        "qk": ya.Param((L, 2 * H * D, E), split={"tensor": (-2, 2)}, **draw),  # of each a part
        "v": fixed(ya.Param((L, H * D, E), split={"tensor": -2}, **draw)),
        "o": ya.Param((L, E, H * D), split={"tensor": -1}, **draw),
        "norm": fixed(ya.Param((L, E), **draw)),
        "pinned": ya.Pinned(ya.Param((L, FF), split={"tensor": -1}, **draw)),
        "route": ya.Param((L, X, E), **draw),
        "up": ya.Param((L, X, FF, E), split={"expert": -3, "tensor": -2}, **draw),
        "down": ya.Param((L, X, E, FF), split={"expert": -3, "tensor": -1}, **draw),
    }
    tree: dict[str, Any] = {"embed": {"w": ya.Param((V, E), **draw)}, "layers": ya.Stacked(layer)}
    if not of.tied:
        tree["head"] = {"w": ya.Param((V, E), split={"tensor": -2}, **draw)}
    return tree


def positions(length: int, rank: int, zigzag: bool) -> Tensor:
    """The places in the whole sequence of the tokens that a rank of `context` has."""
    n = ya.axis_size("context")
    if not zigzag:
        return rank * length + torch.arange(length)
    half = torch.arange(length // 2)
    return torch.cat([rank * (length // 2) + half, (2 * n - 1 - rank) * (length // 2) + half])


def attention(q: Tensor, k: Tensor, v: Tensor, zigzag: bool) -> Tensor:
    """A ring over `context`: causal by the places of tokens, with one softmax over all of it."""
    n = ya.axis_size("context")
    me = ya.axis_index("context")
    length = q.shape[2]
    ring = [(i, (i + 1) % n) for i in range(n)]
    mine = positions(length, me, zigzag)
    most = torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    weight = torch.zeros_like(most)
    out = torch.zeros_like(q)
    for step in range(n):
        theirs = positions(length, (me - step) % n, zigzag)
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(mine[:, None] < theirs, -math.inf)
        new = torch.maximum(most, scores.amax(-1)).detach()
        base = torch.where(new.isinf(), 0.0, new)
        scale = torch.exp(most - base).detach()
        each = torch.exp(scores - base[..., None])
        weight = weight * scale + each.sum(-1)
        out = out * scale[..., None] + each @ v
        most = new
        if step + 1 < n:
            k, v = ya.ppermute((k, v), "context", ring)
    return out / weight[..., None]


def dropped(x: Tensor, rate: float, cut: int | None) -> Tensor:
    """Dropout, to the bits of the plain loop: ranks of `tensor` draw alike, for the whole, and take their part along
    dimension `cut`."""
    if not rate:
        return x
    n, at = (1, 0) if cut is None else (ya.axis_size("tensor"), ya.axis_index("tensor"))
    shape = [size * (n if dim == cut else 1) for dim, size in enumerate(x.shape)]
    return x * (torch.rand(shape, dtype=x.dtype) >= rate).chunk(n, cut or 0)[at] / (1 - rate)


def block(x: Tensor, w: dict[str, Tensor], of: Options) -> tuple[Tensor, None]:
    """x: [B, S, E], [B, S / T, E] with sequence parallelism"""

    def all_tokens(y: Tensor) -> Tensor:
        return ya.all_gather(y, "tensor", axis=1, tiled=True) if of.sequence_parallel else y

    def added(y: Tensor) -> Tensor:
        if of.sequence_parallel:
            return ya.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return ya.psum(y, "tensor")

    h = all_tokens(F.rms_norm(x, (E,), w["attention_norm"]))
    parts = (*ya.linear(h, w["qk"]).chunk(2, -1), ya.linear(h, w["v"]))
    q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
    more = added(ya.linear(attention(q, k, v, of.zigzag).transpose(1, 2).flatten(2), w["o"]))
    x = x + dropped(more, of.dropout, 1 if of.sequence_parallel else None)
    h = all_tokens(F.rms_norm(x, (E,), w["norm"]))
    gates = F.softmax(ya.linear(h, w["route"]), -1)
    tokens = (gates.movedim(-1, 0)[..., None] * h).flatten(1, 2)  # [X, tokens, E]
    tokens = ya.all_to_all(tokens, "expert", 0, 1, tiled=True)  # [X / ranks, tokens of all, E]
    hidden = dropped(F.silu(torch.bmm(tokens, w["up"].mT)) * w["pinned"], of.dropout, 2)
    done = ya.all_to_all(torch.bmm(hidden, w["down"].mT), "expert", 1, 0, tiled=True)
    return x + added(done.sum(0).unflatten(0, h.shape[:2])), None


def head(w: dict[str, Tensor], x: Tensor, targets: Tensor, weights: Tensor, split: bool) -> Tensor:
    """The sum of weighted cross-entropies. split: no rank has all logits"""
    logits = ya.linear(x, w["w"])
    if not split:
        return (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()
    first = ya.axis_index("tensor") * logits.shape[-1]
    top = ya.pmax(logits.detach().amax(-1), "tensor")
    lse = ya.psum(torch.exp(logits - top[..., None]).sum(-1), "tensor").log() + top
    at = targets - first
    here = (at >= 0) & (at < logits.shape[-1])
    right = logits.gather(-1, at.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * here
    return ((lse - ya.psum(right, "tensor")) * weights).sum()


def loss_of(of: Options = PLAIN) -> Any:
    def loss(p: dict[str, Any], batch: Batch) -> ya.Mean:
        x = ya.apply(lambda w, tokens: ya.embedding(tokens, w["w"]), p["embed"], batch["tokens"])
        if of.sequence_parallel:
            n = ya.axis_size("tensor")
            x = x.unflatten(1, (n, -1))[:, ya.axis_index("tensor")]
        x, _ = ya.scan(lambda carry, w: block(carry, w, of), x, p["layers"], unroll=of.unroll)
        if of.sequence_parallel:
            x = ya.all_gather(x, "tensor", axis=1, tiled=True)
        last = p["embed"] if of.tied else p["head"]
        total = ya.apply(head, last, x, batch["targets"], batch["weights"], not of.tied)
        return ya.Mean(total, batch["weights"].sum())

    return loss


def batch_of(step: int, rows: int = ROWS) -> Batch:
    """The global batch of a step; weights are uneven, some of them zero."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(V, (rows, S), generator=generator) for _ in range(2))
    weights = torch.rand(rows, S, generator=generator, dtype=torch.float64)
    return {"tokens": tokens, "targets": targets, "weights": weights * (weights > 0.2)}
