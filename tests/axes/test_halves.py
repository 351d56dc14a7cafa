"""Attention of the two parts of a sequence that a rank of `context` has: masks, work, and the kernel that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from models.parts import attention, axes

S = 24


@pytest.mark.parametrize("window", [None, 1, 5, 7, 23, 24, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_masks_are_rows_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, documents: bool, window: int | None) -> None:
    ids = (torch.rand(2, S, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1)
    starts = attention.starts_of(ids) if documents else None
    for ranks in (2, 3, 6):
        monkeypatch.setattr(ya, "axis_size", lambda name, ranks=ranks: ranks)
        for me in range(ranks):
            monkeypatch.setattr(ya, "axis_index", lambda name, me=me: me)
            at = axes.places(S // ranks, torch.device("cpu"))
            low = torch.zeros(1, S, dtype=torch.int64) if starts is None else starts
            want = (torch.arange(S) <= at[:, None]) & (torch.arange(S) >= low[:, at, None])
            want &= torch.arange(S) > at[:, None] - (window or S)
            own = None if starts is None else starts[:, at]
            found = attention.seen_by_halves(S // ranks, own, window, torch.device("cpu"))
            for mask, rows, want_rows in zip(found, at.chunk(2), want.chunk(2, 1), strict=True):
                end = int(rows[-1]) + 1
                if mask is None:
                    assert not documents and (window is None or window >= end)
                    mask = attention.seen(len(rows), end, None, None, torch.device("cpu"))
                mask = torch.ones(len(rows), end, dtype=torch.bool).tril() if mask is None else mask
                whole = F.pad(mask.expand(*mask.shape[:-2], len(rows), -1), (end - mask.shape[-1], S - end))
                assert torch.equal(whole.reshape(-1, len(rows), S).expand_as(want_rows), want_rows)
                assert mask.shape[-1] <= (window or S) + len(rows)


def test_every_rank_has_as_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (2, 3, 4):
        monkeypatch.setattr(ya, "axis_size", lambda name, ranks=ranks: ranks)
        assert len({sum(axes.starts(S // ranks, me)) for me in range(ranks)}) == 1


def test_a_kernel_without_a_mask_where_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its diagonal ends at the last key."""
    taken = []

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, *, is_causal: bool) -> Any:
        taken.append((dropout, is_causal))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), None

    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    want = attention._attention(q, k, k, None)
    monkeypatch.setattr(attention, "_fits_flash", lambda q, k, v, grouped: grouped)
    monkeypatch.setattr(attention, "flash_attention", flash)
    torch.testing.assert_close(attention._attention(q, k, k, None), want)
    assert taken == [(0.0, True)]
    for keys, mask in ((3, None), (9, torch.ones(3, 5, dtype=torch.bool))):  # as always
        attention._attention(q, k[:, :, :keys], k[:, :, :keys], mask)
    assert len(taken) == 1
