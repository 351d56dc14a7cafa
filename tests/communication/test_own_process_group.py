"""After a user's own `init_process_group("nccl")`: its group has no backend for the CPU, on which hosts agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from models import hf, llama
from tests.checkpoint.test_resharding import TX, net, same, stepped, whole
from tests.harness.pool import Pool, on_ranks
from yafsdp_fn import checkpoint


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Its ranks' process group is not the others'."""
    made = Pool(2)
    yield made
    made.stop()


def of_the_user(mesh: Any, meet: str) -> Any:
    """Begins a process group as a user does, for CUDA alone (gloo's, which needs no GPU)."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    return ya.mesh(device="cpu")


def saves(mesh: Any, folder: str) -> None:
    mesh = of_the_user(mesh, f"{folder}/meet")
    state = stepped(ya.init(net(), TX, mesh=mesh, seed=4), 2)
    with checkpoint.Saver(f"{folder}/beside") as saver:
        saver.save(state)
    checkpoint.save(f"{folder}/plain", state)
    checkpoint.save_named(f"{folder}/named", state.params, lambda path, layer: f"{path} {layer}")
    for saved in ("beside", "plain"):
        got, _ = checkpoint.load(f"{folder}/{saved}", ya.init(net(), TX, mesh=mesh))
        assert same(whole(got), whole(state))
    config = llama.CONFIGS["debug"]
    hf.save(f"{folder}/model", config, ya.init(llama.params(config), TX, mesh=mesh).params)


def test_states_are_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(saves, str(tmp_path))


class Asked(Exception):
    """A collective begins."""


@on_ranks(2)
def test_nccl_is_told_the_launch_order_before_its_first_collective(_: Any) -> None:
    """NCCL reads it when ranks of a CUDA mesh first compare notes."""

    def collective(*args: Any, **options: Any) -> None:
        raise Asked

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(dist, "all_gather_object", collective)
        with pytest.raises(Asked):
            ya.mesh(device="cuda")
        assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
