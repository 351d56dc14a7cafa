"""Attention to the visible keys: the past, of the query's own document, within a window, in a cache or not.

query i sees key j    where    low[i] <= j <= i    and    low[i] = max(start of i's document, i - window + 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

import yafsdp_fn as ya
from models.parts import axes
from yafsdp_fn.util.torch_private import flash_attention


class Positions(NamedTuple):
    """The positions of tokens, for every layer: made once per forward (`consts` of the scan)."""

    cos: Float[Tensor, "*#B S 1 D"] | None = None
    """Rotation of queries and keys, with `sin`; None if positions are not rotary."""
    sin: Float[Tensor, "*#B S 1 D"] | None = None
    mask: Bool[Tensor, "*#B S T"] | None = None
    """True for keys that a query sees. None: its whole past."""
    halves: tuple[Bool[Tensor, "*#B s T"] | None, Bool[Tensor, "*#B s T"] | None] | None = None
    """Over `context`, in place of `mask`: the masks of this rank's two parts of the sequence, for the last T keys up to
    the part's end."""


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


def seen_by_halves(
    length: int, starts: Int[Tensor, "B S"] | None, window: int | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the masks of the two parts of `length` tokens that this rank of `context` has: see `Positions.halves`."""
    half = length // 2

    def of(first: int, starts: Int[Tensor, "B s"] | None) -> Tensor | None:
        end = first + half
        if starts is None and (window is None or window >= end):
            return None
        keys = end if window is None else min(end, half - 1 + window)
        return seen(half, keys, None if starts is None else starts - (end - keys), window, device)

    early, late = axes.starts(length, ya.axis_index("context"))
    return of(early, None if starts is None else starts[:, :half]), of(
        late, None if starts is None else starts[:, half:]
    )


def attend(
    q: Float[Tensor, "B S H D"],
    k: Float[Tensor, "B S K D"],
    v: Float[Tensor, "B S K D"],
    at: Positions,
    cache: Cache | None,
) -> Float[Tensor, "B S HD"]:
    """Computes grouped-query attention (K = H: multi-head), heads joined. With a cache, keys and values become its last
    S, in place, and queries see all of it that the mask allows.

    Over `context` keys and values of all ranks are gathered, and of this rank's two parts each meets those up to its
    end: as much work on every rank. A ring would send as many bytes, and keep as many for the backward.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, S, D]
    S = q.shape[2]
    if at.halves is not None:
        k, v = axes.in_order(torch.stack([k, v]), 3).unbind()
        ends = [start + S // 2 for start in axes.starts(S, ya.axis_index("context"))]
        parts = zip(q.chunk(2, 2), ends, at.halves, strict=True)
        x = torch.cat([_attention(query, k[:, :, :end], v[:, :, :end], mask) for query, end, mask in parts], 2)
    elif cache is not None:
        cache.k[:, :, -S:], cache.v[:, :, -S:] = k, v
        x = _attention(q, cache.k, cache.v, at.mask)
    else:
        x = _attention(q, k, v, at.mask)
    return x.transpose(1, 2).flatten(2)


def _attention(
    q: Float[Tensor, "B H S D"], k: Float[Tensor, "B K T D"], v: Float[Tensor, "B K T D"], mask: Tensor | None
) -> Float[Tensor, "B H S D"]:
    """Computes attention to the last keys, as many as the mask has; without one to all that are not later."""
    S, grouped = q.shape[2], k.shape[1] < q.shape[1]
    if mask is not None:
        k, v = k[:, :, -mask.shape[-1] :], v[:, :, -mask.shape[-1] :]
    elif 1 < S < k.shape[2]:
        if _fits_flash(q, k, v, grouped):
            out: Tensor = flash_attention(q, k, v, 0.0, is_causal=True)[0]
            return out
        mask = seen(S, k.shape[2], None, None, q.device)
    # `is_causal` aligns the first query with the first key: right for a whole sequence only
    causal = mask is None and k.shape[2] == S
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    """Returns whether torch's flash kernel takes these, whose diagonal ends at the last key."""
    return q.is_cuda and q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, grouped))
