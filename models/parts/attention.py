"""Attention to the visible keys: the past, of the query's own document, within a window, in a cache or not.

query i sees key j    where    low[i] <= j <= i    and    low[i] = max(start of i's document, i - window + 1)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts import axes


class Positions(NamedTuple):
    """The positions of tokens, for every layer: made once per forward (`consts` of the scan)."""

    cos: Float[Tensor, "*#B S 1 D"] | None = None
    """Rotation of queries and keys, with `sin`; None if positions are not rotary."""
    sin: Float[Tensor, "*#B S 1 D"] | None = None
    mask: Bool[Tensor, "*#B S T"] | None = None
    """True for keys that a query sees. None: its whole past, for a sequence from its start, or one last query."""
    places: Int[Tensor, "*B S"] | None = None
    """Positions of this rank's tokens in the whole sequence, if it is over `context`; there is no `mask` then."""
    low: Int[Tensor, "*B S"] | None = None
    """The first key that each query sees, with `places`. None: the first of all."""


class Cache(NamedTuple):
    """Keys (already rotated) and values of the positions so far, for all layers or for one."""

    k: Float[Tensor, "*L B K T D"]
    v: Float[Tensor, "*L B K T D"]


def starts_of(documents: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Returns for each position the one at which its document starts: where the number last changed."""
    at = torch.arange(documents.shape[1], device=documents.device)
    changed = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return torch.where(changed, at, 0).cummax(1).values


def first_seen(at: Int[Tensor, " S"], starts: Int[Tensor, "B S"] | None, window: int | None) -> Int[Tensor, "*B S"]:
    """Returns the first key that each query sees, of those at these positions."""
    low = torch.zeros_like(at) if starts is None else starts
    return low if window is None else torch.maximum(low, at - (window - 1))


def seen(
    queries: int, keys: int, starts: Int[Tensor, "B S"] | None, window: int | None, device: torch.device
) -> Bool[Tensor, "*B S T"] | None:
    """Returns the mask of the last `queries` of `keys` positions; [B, 1, S, T] with `starts`, the first key that each
    may see, else [S, T]. None if attention has a fast path: see `Positions.mask`."""
    whole = starts is None and (window is None or window >= keys)
    if whole and queries in (1, keys):
        return None
    at = torch.arange(keys - queries, keys, device=device)
    low = first_seen(at, starts, window)
    all_keys = torch.arange(keys, device=device)
    mask = (all_keys <= at[:, None]) & (all_keys >= low[..., None])
    return mask if starts is None else mask[:, None]


def attend(
    q: Float[Tensor, "B S H D"],
    k: Float[Tensor, "B S K D"],
    v: Float[Tensor, "B S K D"],
    at: Positions,
    cache: Cache | None,
) -> Float[Tensor, "B S HD"]:
    """Computes grouped-query attention (K = H: multi-head), heads joined. With a cache, keys and values become its last
    S, in place, and queries see all of it that the mask allows."""
    if at.places is not None:
        return ring(q, k, v, at.places, at.low)
    mask = at.mask
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, S, D]
    S = q.shape[2]
    if cache is not None:
        cache.k[:, :, -S:], cache.v[:, :, -S:] = k, v
        k, v = cache.k, cache.v
    # `is_causal` aligns the first query with the first key: right for a whole sequence only
    causal, grouped = mask is None and k.shape[2] == S, k.shape[1] < q.shape[1]
    x = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    return x.transpose(1, 2).flatten(2)


def ring(
    q: Float[Tensor, "B S H D"],
    k: Float[Tensor, "B S K D"],
    v: Float[Tensor, "B S K D"],
    places: Int[Tensor, "*B S"],
    low: Int[Tensor, "*B S"] | None,
) -> Float[Tensor, "B S HD"]:
    """Computes causal attention over sequences that are dealt over `context`: keys and values go round, and each query
    has one softmax over all of them, in fp32 at least.

    Of the two parts of a rank (`axes.starts`) each meets those that do not begin after it: as much work on every rank.
    """
    S, K, ranks, me = q.shape[1], k.shape[2], ya.axis_size("context"), ya.axis_index("context")
    wide = torch.promote_types(q.dtype, torch.float32)
    q = (q.reshape(*q.shape[:2], K, -1, q.shape[-1]) / math.sqrt(q.shape[-1])).movedim(1, 3)  # [B, K, H / K, S, D]
    k, v = k.movedim(1, 2)[:, :, None], v.movedim(1, 2)[:, :, None]  # [B, K, 1, S, D]
    lows = (None, None) if low is None else low.chunk(2, -1)
    own = list(zip(axes.starts(S, me), q.chunk(2, 3), places.chunk(2, -1), lows, strict=True))
    found: list[Softmax | None] = [None, None]
    for step in range(ranks):
        for begin, key, value in zip(axes.starts(S, (me - step) % ranks), k.chunk(2, 3), v.chunk(2, 3), strict=True):
            for i, (start, query, at, least) in enumerate(own):
                if begin > start:
                    continue  # all of it comes later
                keys = begin + torch.arange(S // 2, device=q.device)
                mask = None if begin < start else keys <= at[..., None]
                if least is not None:
                    mask = (keys <= at[..., None]) & (keys >= least[..., None])
                if mask is not None and mask.ndim == 3:
                    mask = mask[:, None, None]
                scores = (query @ key.mT).to(wide)
                found[i] = _more(found[i], scores if mask is None else scores.masked_fill(~mask, -math.inf), value)
        if step + 1 < ranks:
            k, v = ya.ppermute((k, v), "context", [(i, (i + 1) % ranks) for i in range(ranks)])
    parts = [each.out / each.weight[..., None] for each in found if each is not None]
    return torch.cat(parts, 3).to(v.dtype).movedim(3, 1).flatten(2)


class Softmax(NamedTuple):
    """A softmax over the keys so far, times their values."""

    most: Float[Tensor, "*B S"]
    weight: Float[Tensor, "*B S"]
    """Sum of exp(score - most)."""
    out: Float[Tensor, "*B S D"]
    """Sum of exp(score - most) * value."""


def _more(so_far: Softmax | None, scores: Float[Tensor, "*B S T"], value: Float[Tensor, "*B T D"]) -> Softmax:
    """Adds keys. The result does not depend on `most`, so that this has no gradient; a query may see none of them."""
    most = scores.detach().amax(-1)
    most = most if so_far is None else torch.maximum(most, so_far.most)
    base = most.masked_fill(most.isinf(), 0.0)
    each = torch.exp(scores - base[..., None])
    weight, out = each.sum(-1), (each.to(value.dtype) @ value).to(scores.dtype)
    if so_far is None:
        return Softmax(most, weight, out)
    scale = torch.exp(so_far.most - base)
    return Softmax(most, so_far.weight * scale + weight, so_far.out * scale[..., None] + out)
