"""Attention to the visible keys: the past, of the query's own document, within a window, in a cache or not.

query i sees key j    where    low[i] <= j <= i    and    low[i] = max(start of i's document, i - window + 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts import axes
from yafsdp_fn.util.torch_private import causal_to_the_last


class Positions(NamedTuple):
    """The positions of tokens, for every layer: made once per forward (`consts` of the scan)."""

    cos: Float[Tensor, "*#B S 1 D"] | None = None
    """Rotation of queries and keys, with `sin`; None if positions are not rotary."""
    sin: Float[Tensor, "*#B S 1 D"] | None = None
    mask: Bool[Tensor, "*#B S T"] | None = None
    """True for keys that a query sees. None: its whole past, for a sequence from its start, or one last query."""
    halves: tuple[Float[Tensor, "*#B h T"] | None, Float[Tensor, "*#B h T"] | None] | None = None
    """Masks of the two parts that a rank of `context` has, in place of `mask`, for the last T keys up to its end: added
    to scores, 0 or -inf; None for the whole past."""


class Cache(NamedTuple):
    """Keys (already rotated) and values of the positions so far, for all layers or for one."""

    k: Float[Tensor, "*L B K T D"]
    v: Float[Tensor, "*L B K T D"]


def starts_of(documents: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Returns for each position the one at which its document starts: where the number last changed."""
    at = torch.arange(documents.shape[1], device=documents.device)
    changed = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return torch.where(changed, at, 0).cummax(1).values


def seen(
    queries: int, keys: int, starts: Int[Tensor, "B S"] | None, window: int | None, device: torch.device
) -> Bool[Tensor, "*B S T"] | None:
    """Returns the mask of the last `queries` of `keys` positions; [B, 1, S, T] with `starts`, the first key that each
    may see, else [S, T]. None if attention has a fast path: see `Positions.mask`."""
    whole = starts is None and (window is None or window >= keys)
    if whole and queries in (1, keys):
        return None
    at = torch.arange(keys - queries, keys, device=device)
    low = torch.zeros_like(at) if starts is None else starts
    low = low if window is None else torch.maximum(low, at - (window - 1))
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
    if at.halves is not None:
        return over_context(q, k, v, at.halves)
    mask = at.mask
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, S, D]
    S = q.shape[2]
    if cache is not None:
        cache.k[:, :, -S:], cache.v[:, :, -S:] = k, v
        k = cache.k
        v = cache.v
    # `is_causal` aligns the first query with the first key: right for a whole sequence only
    causal = mask is None and k.shape[2] == S
    grouped = k.shape[1] < q.shape[1]
    x = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    return x.transpose(1, 2).flatten(2)


def halves(
    length: int, starts: Int[Tensor, "B s"] | None, window: int | None, like: Tensor
) -> tuple[Float[Tensor, "*#B h T"] | None, Float[Tensor, "*#B h T"] | None]:
    """Returns the masks of the two parts that this rank of `context` has, of `length` positions together. like: of the
    device and dtype of layers"""

    def one(first: int, starts: Tensor | None) -> Tensor | None:
        end = first + length // 2
        if starts is None and (window is None or window >= end) and like.is_cuda:
            return None  # its kernels need no mask
        keys = end if window is None or length == 2 else min(end, length // 2 - 1 + window)  # that any query sees
        mask = seen(length // 2, keys, None if starts is None else starts - (end - keys), window, like.device)
        return None if mask is None else torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)

    parts = (None, None) if starts is None else starts.chunk(2, -1)
    first, second = map(one, axes.starts(length, ya.axis_index("context")), parts)
    return first, second


def over_context(
    q: Float[Tensor, "B s H D"],
    k: Float[Tensor, "B s K D"],
    v: Float[Tensor, "B s K D"],
    masks: tuple[Tensor | None, Tensor | None],
) -> Float[Tensor, "B s HD"]:
    """Computes causal attention of sequences that are split over `context`: a rank gathers the keys and values of all
    positions, and each of its two parts (`axes.starts`) sees those up to its own. As much work on every rank.

    One kernel for each part, so that scores never exist. Grouped heads make keys and values small beside queries.
    """
    half = q.shape[1] // 2
    both: Tensor = axes.in_order(torch.stack([k, v]).flatten(0, 1))  # [2 B, S, K, D]
    keys, values = both.transpose(1, 2).chunk(2)
    first = axes.starts(q.shape[1], ya.axis_index("context"))
    found = []
    for query, begin, mask in zip(q.transpose(1, 2).chunk(2, 2), first, masks, strict=True):
        end = begin + half
        seen_by: Tensor = causal_to_the_last(half, end) if mask is None else mask  # query i: keys up to begin + i
        met = slice(0 if mask is None else end - mask.shape[-1], end)
        key = keys[:, :, met]
        value = values[:, :, met]
        grouped = k.shape[2] < q.shape[2]
        found.append(F.scaled_dot_product_attention(query, key, value, seen_by, enable_gqa=grouped))
    return torch.cat(found, 2).transpose(1, 2).flatten(2)
