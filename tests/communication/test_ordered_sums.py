"""Additions in the order of micro-shards: the same bits whether rows come together or one after the other."""

from __future__ import annotations

import pytest
import torch

from yafsdp_fn.communication.micro_shards import CHUNK, Scratch, local_sum
from yafsdp_fn.communication.sums import add_rows, in_order

CPU = torch.device("cpu")
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("shard", "wire"), DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_rows_together_are_rows_one_after_the_other(shard: torch.dtype, wire: torch.dtype, add: bool) -> None:
    scratch = Scratch(CPU)
    generator = torch.Generator().manual_seed(0)
    n = CHUNK["cpu"] + 24  # more than a chunk
    rows = torch.randn(5, n, generator=generator, dtype=torch.float64).to(wire)
    start = torch.randn(n, generator=generator, dtype=torch.float64).to(shard)
    together = start.clone()
    alone = start.clone()
    plain = start.double()
    add_rows(together, rows, scratch, add=add)
    for number, row in enumerate(rows):
        add_rows(alone, row[None], scratch, add=add or number > 0)
        plain = (plain + row.double() if add or number else row.double()).to(shard).double()
    assert torch.equal(together, alone)
    assert torch.equal(together.double(), plain)
    other = start.clone()
    local_sum(other, rows, scratch, add=add)
    assert not add or not torch.equal(other, together), "sums of rows that are added afterwards are other sums"


def test_numbers_of_micro_shards_are_added_one_after_the_other() -> None:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for value in values:
        total += value
    assert torch.equal(in_order(values), total)
