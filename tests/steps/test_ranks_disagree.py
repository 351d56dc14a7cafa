"""Ranks that would do different things are told so, both sides shown, before any collective meets another one."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.failing import (
    TX,
    Fault,
    LossFn,
    Steps,
    backwards,
    batch,
    bits,
    embed,
    head,
    headless,
    layer,
    longer,
    loss,
    loss_with,
    same,
    state,
)
from tests.harness.groups import SOON, TIMEOUT, breakable, outcome
from tests.harness.pool import on_ranks
from yafsdp_fn.runtime import execute


def swapped(params: Any, data: Any) -> torch.Tensor:
    """The head before the layers."""
    x = ya.apply(embed, params["embed"], data["tokens"])
    total: torch.Tensor = ya.apply(head, params["head"], x, data["targets"])
    return total + ya.scan(layer, x, params["layers"])[0].sum()


LOSSES: dict[str, LossFn] = {"swapped": swapped, "backwards": backwards, "headless": headless, "longer": longer}
SIDES = {
    "swapped": ("forward of layers[0] (visit 1, microbatch 0, step 0)", "forward of head (visit 1, "),
    "backwards": ("forward of layers[0] (visit 1, microbatch 0, step 0)", "forward of layers[2] (visit 1, "),
    "headless": ("forward of head (visit 4, microbatch 0, step 0)", "the end of the loss, recorded before step 0"),
    "longer": ("the end of the loss, recorded before step 0", "forward of head (visit 5, microbatch 0, step 0)"),
}


@on_ranks(2)
@pytest.mark.parametrize("which", LOSSES)
def test_other_visits_in_the_first_step(mesh: Any, which: str) -> None:
    """Rank 0 has the model's own loss, rank 1 another one, in the first step."""
    rank = mesh.get_rank()
    ranks = Steps(LOSSES[which] if rank else loss)
    start = time.monotonic()
    first = ranks.said()
    again = ranks.said()
    seconds = time.monotonic() - start
    assert "RanksDisagree: ranks disagree on what to communicate" in first, first
    for side, text in enumerate(SIDES[which]):
        assert f"rank {side}: {text}" in first
    assert "every rank must visit the same units in the same order" in first
    assert seconds < TIMEOUT
    # the collectives before it have met, but the ranks stand at different places
    assert re.search(rf"rank {rank}: .* lost since .*; restart all ranks", again), again


@on_ranks(2)
def test_another_number_of_microbatches(mesh: Any) -> None:
    ranks = Steps(loss, microbatches=1 + mesh.get_rank())
    start = time.monotonic()
    text = ranks.said()
    seconds = time.monotonic() - start
    assert "RanksDisagree" in text and seconds < TIMEOUT, text
    assert "ranks disagree on the program" in text
    assert "rank 1: " in text


@on_ranks(2)
@pytest.mark.parametrize("name", ["skip_nonfinite", "a function skip"])
def test_other_rules_of_skipping(mesh: Any, name: str) -> None:
    """Rank 0 skips what rank 1 does not: one would write what is not finite, or wait for what the other judges."""
    first = mesh.get_local_rank() == 0
    judge = (lambda metrics: metrics["loss"] > 9.0) if first else None
    options: dict[str, Any] = {"skip_nonfinite": first} if name == "skip_nonfinite" else {"skip": judge}
    said = Steps(loss, **options).said()
    sides = f"{name} differs:\n    rank 0: True\n    rank 1: False"
    assert f"RanksDisagree: ranks disagree on the optimizer; {sides}" in said, said


@on_ranks(2)
@pytest.mark.parametrize("as_programs", [False, True], ids=["factories", "programs"])
def test_other_schedules(mesh: Any, as_programs: bool) -> None:
    """Rank 0 has ZeRO-3, rank 1 ZeRO-2: refused each time. Nothing is lost, since no collective of a program has run;
    then both have the same."""
    rank = mesh.get_local_rank()
    own = (ya.schedules.zero3(), ya.schedules.zero2())[rank]
    fault = Fault()
    now = state(mesh)
    schedule: Any = ya.train_step(loss, TX, schedule=own).lower(now, batch(rank)) if as_programs else own
    step = ya.train_step(loss_with(fault), TX, schedule=schedule)
    before = bits(now)
    found = [outcome(lambda: step(now, batch(rank))) for _ in range(2)]
    assert same(bits(now), before)
    if as_programs:
        assert not fault.events, "a visit ran before the ranks agreed"
    expected, _ = ya.train_step(loss, TX)(state(mesh), batch(rank))
    now, _ = ya.train_step(loss, TX)(now, batch(rank))
    assert same(bits(now), bits(expected))
    for text in found:
        assert "RanksDisagree: ranks disagree on the program; op 0 differs" in text
        assert re.search(r"rank 0: gather embed -> slot \d+\n\s+rank 1: gather embed -> slot \d+", text)


@on_ranks(2)
def test_other_visits_on_one_rank_later(mesh: Any) -> None:
    """A loss that visits other units on rank 1 from the second step on."""
    rank = mesh.get_rank()
    count = 0

    def changing(params: Any, data: Any) -> Any:
        return (swapped if rank and count else loss)(params, data)

    ranks = Steps(changing, 1)
    count = 1
    first = ranks.said(SOON)
    if rank:
        assert "OrderChanged: forward of head (visit 1, microbatch 0, step 1)" in first
        assert "layers[0]" in first
    else:
        assert re.search(r"CommunicationError: rank 0: (gather|reduce) of ", first)
    assert "lost since" in ranks.said()


@on_ranks(2)
@pytest.mark.parametrize("which", ["shapes", "precision", "seeds"])
def test_other_parameters(mesh: Any, which: str) -> None:
    """States whose description depends on the rank."""
    mesh = breakable()
    rank = mesh.get_local_rank()
    tree = {"head": ya.Param((5, 11 + (16 * rank if which == "shapes" else 0)))}
    precision = ya.Precision(compute=torch.bfloat16) if which == "precision" and rank else ya.Precision()
    seed = rank if which == "seeds" else 0

    def run() -> None:
        now = ya.init(tree, TX, mesh=mesh, seed=seed, precision=precision)
        ya.train_step(lambda p, data: ya.apply(lambda w: w.square().sum(), p["head"]), TX)(now, batch(rank))

    text = outcome(run)
    assert "RanksDisagree: ranks disagree on " in text
    assert "rank 0: " in text
    assert "rank 1: " in text


@on_ranks(2)
@pytest.mark.parametrize("which", ["sizes", "structures"])
def test_other_aux(mesh: Any, which: str) -> None:
    mesh = breakable()
    rank = mesh.get_local_rank()
    aux: Any = {"a": ya.Sum(torch.ones(2 + rank))} if which == "sizes" else {"a": ya.Sum(torch.ones(2))} if rank else {}
    step = ya.train_step(lambda params, data: (loss(params, data), aux), TX, has_aux=True)
    text = outcome(lambda: step(state(mesh), batch(rank)))
    assert "RanksDisagree: ranks disagree on " in text
    assert "rank 0: " in text
    assert "rank 1: " in text


@on_ranks(2)
def test_a_schedule_that_raises_on_one_rank(mesh: Any) -> None:
    """When the first call has been recorded."""
    rank = mesh.get_rank()

    def schedule(trace: Any) -> Any:
        if rank == 1:
            raise ValueError("planned: schedule")
        return ya.schedules.zero3()(trace)

    ranks = Steps(loss, schedule=schedule)
    Steps(loss, 1, ranks.now.mesh)
    said = ranks.said(SOON)
    if rank:
        assert "planned: schedule" in said
    else:
        assert re.search(r"CommunicationError: rank 0: .*program", said) and "has probably stopped" in said, said


def without_grad_from(call: int, here: bool) -> LossFn:
    """The model's loss; layers are also visited without grad from a call on, where `here`: the first is recorded."""
    calls = []

    def looking(params: Any, data: Any) -> torch.Tensor:
        calls.append(0)
        if here and len(calls) > call:
            with torch.no_grad():
                ya.scan(layer, torch.ones(4, 3, 5), params["layers"])
        return loss(params, data)

    return looking


@on_ranks(2)
def test_a_visit_without_grad_on_one_rank_in_a_later_step_is_no_gather_of_the_others(mesh: Any) -> None:
    """Its gather would meet another layer's of the same size."""
    rank = mesh.get_rank()
    said = Steps(without_grad_from(3, here=rank == 0), 2).said(SOON)
    assert "Error" in said and (rank or "forward of layers[0] (without grad, microbatch 0, step 2)" in said), said


@on_ranks(2)
def test_a_rank_without_memory_for_slots_is_lost_to_the_others_and_says_so(mesh: Any) -> None:
    """Rank 1 alone finds no memory for the slots of a first step, and tries again."""
    rank = mesh.get_rank()
    ranks = Steps(loss)
    Steps(loss, 1, ranks.now.mesh)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(execute, "Slots", lambda *_: (_ for _ in ()).throw(MemoryError("no slots")))
        first = ranks.said(SOON)
    again = ranks.said()
    assert ("MemoryError: no slots\nrank 1 of 2, the slots of step 0" if rank else "CommunicationError") in first
    assert "the communicators are lost since" in again and "restart all ranks" in again, again
