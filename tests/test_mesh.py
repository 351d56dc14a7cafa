"""The mesh of one rank, and cutting batches."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import yafsdp_fn as ya
from tests.small import one_rank
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
