"""Kernels that take time, under Triton's interpreter: the timer is a stand-in that advances when it is looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import EPOCH_NS, LOOK_NS, kernel
from yafsdp_fn.planner.cluster import Phase

pytest.importorskip("triton")
NAME = "benchmarks.emulated.kernels"
mark = kernel(NAME, "mark")
hold = kernel(NAME, "hold")
BLOCK = 8192
NS = 6000


def marked() -> Tensor:
    at = torch.zeros(1, dtype=torch.int64)
    mark(at)
    return at


def nothing() -> Tensor:
    return torch.empty(2, 0)


def test_mark_writes_the_time() -> None:
    first = marked()
    second = marked()
    assert EPOCH_NS < int(first) < int(second)


@pytest.mark.sampled
@pytest.mark.parametrize("resource", ["latency", "node", "network"])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_hold_lasts_as_long_as_its_share_of_the_link_says(resource: str, others: int) -> None:
    """Latency is not shared. The time that it leaves is when the phase was over, to one look of the timer."""
    users = torch.full((3,), others, dtype=torch.int32)
    at = marked()
    start = int(at)
    hold(at, users, Phase(resource, NS / 1e9), nothing(), 0)
    expected = NS * (1 if resource == "latency" else 1 + others)
    assert expected <= int(at) - start <= expected + 2 * LOOK_NS
    assert users.tolist() == [others] * 3  # who enters leaves


def test_phases_follow_each_other_without_a_gap() -> None:
    users = torch.zeros(3, dtype=torch.int32)
    at = marked()
    start = int(at)
    for resource in ("latency", "node", "network"):
        hold(at, users, Phase(resource, NS / 1e9), nothing(), 0)
    assert 3 * NS <= int(at) - start <= 3 * (NS + 2 * LOOK_NS)


@pytest.mark.parametrize("nbytes", [4, 4 * 8 * BLOCK, 4 * 8 * BLOCK + 4])
def test_bytes_are_copied(nbytes: int) -> None:
    """Eight programs copy a block each, or two, from the first row to the second."""
    scratch = torch.stack([torch.arange(20.0 * BLOCK), torch.full((20 * BLOCK,), -1.0)])
    at = marked()
    users = torch.zeros(3, dtype=torch.int32)
    start = int(at)
    hold(at, users, Phase("node", NS / 1e9), scratch, nbytes)
    copied = 8 * BLOCK * (1 if nbytes <= 4 * 8 * BLOCK else 2)
    assert torch.equal(scratch[1, :copied], scratch[0, :copied])
    assert bool((scratch[1, copied:] == -1).all())
    assert int(at) - start >= NS


def test_copies_begin_again_at_the_end_of_the_scratch() -> None:
    scratch = torch.stack([torch.arange(3.0 * BLOCK), torch.full((3 * BLOCK,), -1.0)])
    hold(marked(), torch.zeros(3, dtype=torch.int32), Phase("network", NS / 1e9), scratch, 4 * 8 * BLOCK)
    assert torch.equal(scratch[1], scratch[0])
