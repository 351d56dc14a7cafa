"""Attention of the two parts of a sequence that a rank of `context` has: masks, and work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import yafsdp_fn as ya
from models.parts import attention, axes
from yafsdp_fn.util.torch_private import causal_to_the_last

S = 24


@pytest.mark.parametrize("window", [None, 1, 5, 7, 23, 24, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_masks_are_rows_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, documents: bool, window: int | None) -> None:
    ids = (torch.rand(2, S, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1)
    starts = attention.starts_of(ids) if documents else None
    for ranks in (2, 3, 6, 12):
        monkeypatch.setattr(ya, "axis_size", lambda name, ranks=ranks: ranks)
        for me in range(ranks):
            monkeypatch.setattr(ya, "axis_index", lambda name, me=me: me)
            at = axes.places(S // ranks, torch.device("cpu"))
            low = torch.zeros(1, S, dtype=torch.int64) if starts is None else starts
            want = (torch.arange(S) <= at[:, None]) & (torch.arange(S) >= low[:, at, None])
            want &= torch.arange(S) > at[:, None] - (window or S)
            own = None if starts is None else starts[:, at]
            found = attention.halves(S // ranks, own, window, torch.ones(1))
            for mask, rows, want_rows in zip(found, at.chunk(2), want.chunk(2, 1), strict=True):
                end = int(rows[-1]) + 1
                if mask is None:
                    assert not documents
                    assert window is None or window >= end
                    seen = torch.ones(len(rows), end).tril(end - len(rows)) > 0
                    mask = torch.zeros(len(rows), end).masked_fill(~seen, -torch.inf)
                assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
                mask = mask == 0
                whole = F.pad(mask.expand(*mask.shape[:-2], len(rows), -1), (end - mask.shape[-1], S - end))
                assert torch.equal(whole.reshape(-1, len(rows), S).expand_as(want_rows), want_rows)
                assert len(rows) == 1 or mask.shape[-1] < (window or S) + len(rows)


def test_every_rank_has_as_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (2, 3, 4):
        monkeypatch.setattr(ya, "axis_size", lambda name, ranks=ranks: ranks)
        assert len({sum(axes.starts(S // ranks, me)) for me in range(ranks)}) == 1


def test_the_mask_of_a_kernel_has_no_elements() -> None:
    assert causal_to_the_last(4096, 131_072).untyped_storage().nbytes() == 0
