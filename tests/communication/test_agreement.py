"""Agreement between two ranks, and the collectives beneath, in real processes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.communication.backends import exchanging
from tests.harness.pool import Pool
from yafsdp_fn.communication.communicators import Communicators, communicators
from yafsdp_fn.util.torch_private import side_store


def agree(mesh: Any) -> tuple[bool, bool, bool]:
    comms = communicators(mesh)
    same = comms.same_on_all("text", "test")
    other = comms.same_on_all(f"text of {comms.rank}", "test")
    comms.must_agree("this", {"text": "one for all"})
    return same, other, communicators(mesh) is comms


def test_texts_are_compared(pools: dict[int, Pool]) -> None:
    assert pools[2].run(agree) == [(True, False, True)] * 2


def disagree(mesh: Any) -> str:
    comms = communicators(mesh)
    try:
        comms.must_agree("what to communicate", {"op": f"gather of layers[{comms.rank}]"})
    except ya.errors.RanksDisagree as error:
        comms.must_agree("this", {"text": "after it"})
        return str(error)
    return "nothing"


def test_a_disagreement_shows_both_sides_on_every_rank(pools: dict[int, Pool]) -> None:
    one, two = pools[2].run(disagree)
    assert one == two
    assert one.splitlines()[:3] == [
        "ranks disagree on what to communicate; op differs:",
        "    rank 0: gather of layers[0]",
        "    rank 1: gather of layers[1]",
    ]
    assert issubclass(ya.errors.RanksDisagree, ya.errors.CommunicationError)


def collect(mesh: Any, dtype: torch.dtype, exchange: bool) -> None:
    """All-gather and reduce-scatter through both paths, against what they mean."""
    comms = communicators(mesh)
    with exchanging(exchange):
        for n in (8, 24):
            shards = [torch.arange(n).to(dtype) + 100 * rank for rank in range(2)]
            whole = comms.all_gather(shards[comms.rank])
            assert torch.equal(whole, torch.cat(shards)) and whole.dtype == dtype
            full = [torch.arange(2 * n).to(dtype) * (rank + 1) for rank in range(2)]
            kept = full[comms.rank].clone()
            mine = comms.reduce_scatter(full[comms.rank])
            assert torch.equal(mine, sum(full)[comms.rank * n : (comms.rank + 1) * n])
            assert torch.equal(full[comms.rank], kept)  # the source is not overwritten


def test_both_ways_of_a_collective_agree(pools: dict[int, Pool]) -> None:
    for exchange in (False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            pools[2].run(collect, dtype, exchange)


def collect_rows(mesh: Any, exchange: bool) -> None:
    """Tensors of two dims, as a vmap over the pure path makes them: the first one is gathered and scattered."""
    comms = communicators(mesh)
    with exchanging(exchange):
        shards = [torch.arange(24.0).view(8, 3) + 100 * rank for rank in range(2)]
        assert torch.equal(comms.all_gather(shards[comms.rank]), torch.cat(shards))
        mine = comms.reduce_scatter(torch.cat(shards))
        assert torch.equal(mine, 2 * shards[comms.rank])


@pytest.mark.parametrize("exchange", [False, True])
def test_rows_are_gathered_and_scattered_too(pools: dict[int, Pool], exchange: bool) -> None:
    pools[2].run(collect_rows, exchange)


def scalars(mesh: Any) -> list[list[float]]:
    comms = communicators(mesh)
    values = torch.tensor([1.0 + comms.rank, -2.0 * comms.rank], dtype=torch.float64)
    return [comms.all_reduce_sum(values.clone()).tolist(), comms.all_reduce_max(values.clone()).tolist()]


def test_scalars(pools: dict[int, Pool]) -> None:
    assert pools[2].run(scalars) == [[[3.0, -2.0], [2.0, 0.0]]] * 2


def lose(mesh: Any) -> list[str]:
    """One rank fails alone: afterwards every use of the communicators says so. They are made for this test alone."""
    comms = Communicators(mesh)
    comms.abort("together", ValueError())
    said = [str(comms.lost)]
    comms.abort("forward of a" if comms.rank == 0 else "backward of b", ValueError())
    for use in (comms.check, lambda: comms.all_gather(torch.ones(8))):
        try:
            use()
        except ya.errors.CommunicationError as error:
            said.append(str(error))
    return said


def test_failures_at_one_place_leave_the_communicators_usable_others_do_not(pools: dict[int, Pool]) -> None:
    for rank, said in enumerate(pools[2].run(lose)):
        place = ("forward of a", "backward of b")[rank]
        assert said[0] == "None" and len(said) == 3
        assert all(f"rank {rank}: the communicators are lost since" in text and place in text for text in said[1:])


def says(mesh: Any) -> tuple[str | None, str]:
    """Rank 0 fails where rank 1 did, once rank 1 has said so. Whether the communicators are lost, and what was said."""
    comms, said = Communicators(mesh), io.StringIO()
    store = side_store("said", timedelta(seconds=60))
    if comms.rank == 0:
        store.wait(["said"])
    else:
        said.flush = lambda: store.set("said", "")
    with redirect_stderr(said):
        comms.abort("forward of a", ValueError("odd"))
    return comms.lost, said.getvalue()


def test_a_failure_is_said_before_the_others_are_waited_for(pools: dict[int, Pool]) -> None:
    for rank, (lost, said) in enumerate(pools[2].run(says)):
        assert lost is None
        assert said == (
            f"rank {rank} of 2, forward of a: ValueError: odd. It waits up to 30 s for the others, to learn whether "
            "all failed here\n"
        )
