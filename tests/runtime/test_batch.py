"""Batches, cut into the parts of ranks and into microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import one_rank
from yafsdp_fn.runtime.batch import split_batch


@on_ranks(4)
@pytest.mark.parametrize("replicate", [1, 2, 4])
def test_a_rank_gets_its_rows_and_so_does_a_replica(mesh: Any, replicate: int) -> None:
    batch = {"x": torch.arange(8).view(8, 1), "scale": torch.tensor(3.0), "n": 5, "none": None}
    rank = mesh.get_rank()
    mine = ya.shard_batch(batch, ya.mesh(device="cpu", replicate=replicate))
    assert mine["x"].flatten().tolist() == [2 * rank, 2 * rank + 1]
    assert mine["scale"] == 3
    assert mine["n"] == 5


def test_one_rank_gets_the_batch() -> None:
    x = torch.ones(3)
    found = ya.shard_batch({"x": x}, one_rank())["x"]
    assert torch.equal(found, x) and found.data_ptr() == x.data_ptr()  # in the same memory
    with pytest.raises(TypeError, match=r"contxt=1.*did you mean context"):
        ya.shard_batch({"x": x}, one_rank(), split={"contxt": 1})


@on_ranks(4)
def test_rows_that_do_not_divide_are_named(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"shard_batch: a.x has 3 rows, not a multiple of 4 ranks"):
        ya.shard_batch({"a": {"x": torch.ones(3)}}, ya.mesh(device="cpu", replicate=2))
    with pytest.raises(ValueError, match=r"shard_batch: the batch has 3 rows"):
        ya.shard_batch(torch.ones(3), mesh)


def test_parts_are_views_that_cover_the_batch() -> None:
    x = torch.arange(12).view(6, 2)
    part = split_batch({"x": x}, 3, "test", "parts")
    parts = [part(index)["x"] for index in range(3)]
    assert torch.equal(torch.cat(parts), x)
    assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)
    assert split_batch({"x": torch.empty(0, 2)}, 3, "test", "parts")(2)["x"].shape == (0, 2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_leaves_are_named_as_the_user_names_them() -> None:
    with pytest.raises(ValueError, match=r"x.right has 3 rows, not a multiple of 2 parts"):
        split_batch({"x": Pair(torch.ones(2), torch.ones(3))}, 2, "test", "parts")


def test_sharded_parameters_stay_whole() -> None:
    params = ya.init({"w": ya.Param((3,))}, ya.optim.sgd(0.1), mesh=one_rank()).params
    part = split_batch({"p": params, "x": torch.arange(4)}, 2, "test", "parts")(1)
    assert part["p"]["w"] is params["w"]
    assert part["x"].tolist() == [2, 3]
