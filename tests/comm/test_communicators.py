"""Communicators of one rank: nothing is made, nothing is communicated."""

from __future__ import annotations

import torch

from tests.small import one_rank
from yafsdp_fn.comm.communicators import Communicators, communicators
from yafsdp_fn.comm.streams import HostEvent


def test_a_mesh_has_one_set_of_communicators() -> None:
    assert communicators(one_rank()) is communicators(one_rank())


def test_one_rank_needs_no_streams_and_no_groups() -> None:
    comms = Communicators(one_rank())
    assert (comms.rank, comms.ranks, comms.device) == (0, 1, torch.device("cpu"))
    assert not any(hasattr(comms, name) for name in ("gather", "reduce", "gather_group", "control_group"))
    values = torch.tensor([3.0])
    assert comms.all_reduce_sum(values) is values and comms.all_reduce_max(values) is values and values == 3
    assert comms.same_on_all("a", "test")
    comms.must_agree("this", {"text": "a"})
    comms.drain()
    comms.abort("anywhere", ValueError())
    comms.check()
    assert isinstance(comms.compute_event(), HostEvent)
