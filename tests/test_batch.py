"""Batches, cut into the parts of ranks and into microbatches."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import yafsdp_fn as ya
from tests.small import one_rank
from yafsdp_fn.batch import split_batch


class TwoRanks:
    """The second of two ranks, as far as shard_batch asks."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 1


def test_a_rank_gets_its_rows() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "scale": torch.tensor(3.0), "n": 5, "none": None}
    mine = ya.shard_batch(batch, TwoRanks())
    assert mine["x"].tolist() == [[4, 5], [6, 7]] and mine["scale"] is batch["scale"] and mine["n"] == 5
    whole = ya.shard_batch(batch, one_rank())
    assert whole["x"] is batch["x"]


def test_rows_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"shard_batch: a.x has 3 rows, not a multiple of 2 ranks"):
        ya.shard_batch({"a": {"x": torch.ones(3)}}, TwoRanks())
    with pytest.raises(ValueError, match="shard_batch: the batch has 3 rows"):
        ya.shard_batch(torch.ones(3), TwoRanks())


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
    assert part["p"]["w"] is params["w"] and part["x"].tolist() == [2, 3]
