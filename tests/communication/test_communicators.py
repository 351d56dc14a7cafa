"""Communicators of one rank: nothing is made, nothing is communicated."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch.distributed as dist

import yafsdp_fn as ya
from tests.harness.meshes import MESHES
from tests.harness.pool import on_ranks
from tests.harness.small import batch, loss, model, one_rank
from yafsdp_fn.communication.communicators import communicators


def test_a_mesh_has_one_set_of_communicators() -> None:
    assert communicators(one_rank()) is communicators(one_rank())


TX = ya.optim.sgd(0.1)


@on_ranks(2)
@pytest.mark.parametrize("name", ["shard", "replicate"])
def test_communicators_end_with_the_last_that_holds_their_mesh(mesh: Any, name: str) -> None:
    """Of a mesh that trained a state: both dropped, or the state alone kept until the end."""
    known = {id(thread) for thread in threading.enumerate()}
    own = ya.mesh(device="cpu", **MESHES[name])
    state, _ = ya.train_step(loss, TX)(ya.init(model(), TX, mesh=own), batch(mesh.get_local_rank()))
    comms = communicators(own)
    groups = [group.process_group for group in (*comms.groups, comms.metrics_group, comms.control_group)]
    threads = [thread for thread in threading.enumerate() if id(thread) not in known]
    assert len(threads) >= len(comms.streams) >= 2
    del comms, own
    gc.collect()
    assert all(thread.is_alive() for thread in threads), "the state holds the mesh"
    del state
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    for group in groups:
        with pytest.raises(ValueError, match=r"Invalid|not initialized"):
            dist.get_backend(group)
