"""Failures of ranks that are told to each other, in real processes."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.streams import HostEvent
from yafsdp_fn.util.torch_private import side_store


def test_a_disagreement_is_a_failure_of_communication() -> None:
    assert issubclass(ya.errors.RanksDisagree, ya.errors.CommunicationError)


@on_ranks(2)
def test_ranks_compare_notes_under_another_default_device(mesh: Any) -> None:
    """As by torch.set_default_device("cuda"): what they compare stays on the CPU."""
    with torch.device("meta"):
        state = ya.init({"w": ya.Param((3,))}, None, mesh=mesh)
        assert Communicators(mesh).same_on_all("a text", "a test")
    assert ya.unshard(state.params)["w"].shape == (3,)


@on_ranks(2)
def test_failures_at_one_place_leave_the_communicators_usable_others_do_not(mesh: Any) -> None:
    """One rank fails alone: afterwards every use of the communicators says so. They are made for this test alone."""
    comms = Communicators(mesh)
    event = HostEvent()
    comms.stream("gather").submit(lambda: time.sleep(0.1), (), event, "what is under way")
    comms.abort("together", ValueError())
    assert event.over, "streams have run dry"
    assert comms.lost is None
    place = ("forward of a", "backward of b")[comms.rank]
    comms.abort(place, ValueError())
    for use in (comms.check, lambda: comms.all_gather(torch.ones(8))):
        lost = f"rank {comms.rank}: the communicators are lost since.*{place}"
        with pytest.raises(ya.errors.CommunicationError, match=f"(?s){lost}"):
            use()


@on_ranks(2)
def test_a_failure_is_said_before_the_others_are_waited_for(mesh: Any) -> None:
    """Rank 0 fails where rank 1 did, once rank 1 has said so."""
    comms = Communicators(mesh)
    said = io.StringIO()
    store = side_store("said", timedelta(seconds=60))
    if comms.rank == 0:
        store.wait(["said"])
    else:
        said.flush = lambda: store.set("said", "")
    with redirect_stderr(said):
        comms.abort("forward of a", ValueError("odd"))
    assert comms.lost is None
    assert said.getvalue() == (
        f"rank {comms.rank} of 2, forward of a: ValueError: odd. It waits up to 30 s for the others, to learn whether "
        "all failed here\n"
    )
