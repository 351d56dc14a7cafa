"""The mesh of one rank, and cutting batches."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import yafsdp_fn as ya
from tests.small import one_rank
from yafsdp_fn.batch import split_batch
from yafsdp_fn.mesh import device_of


def test_without_torchrun_there_is_one_rank() -> None:
    mesh = one_rank()
    assert mesh.size() == 1 and mesh.mesh_dim_names == ("shard",) and mesh.get_local_rank() == 0
    assert device_of(mesh) == torch.device("cpu")
    again = ya.mesh(device="cpu", shard=1)
    assert again.size() == 1 and again == mesh


def test_a_world_size_that_differs_is_refused() -> None:
    one_rank()
    with pytest.raises(ValueError, match=r"mesh\(shard=3\): there are 1 ranks; start 3 of them .*--nproc-per-node 3"):
        ya.mesh(shard=3, device="cpu")


def test_a_timeout_comes_too_late_for_an_existing_group() -> None:
    one_rank()
    with pytest.raises(ValueError, match="the process group exists already"):
        ya.mesh(device="cpu", timeout=timedelta(seconds=1))


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
