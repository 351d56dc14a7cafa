"""Delays before any op, different on every rank, change no number: nothing depends on who is early."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, SCHEDULES
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.streams import Event, HostStream
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.schedules import Scoreboard

TX = ya.optim.adamw(1e-2)
Work = Callable[[], None]
Delays = dict[str, tuple[float, float]]
"""`gather`, `reduce`, `compute` or `update` -> probability and longest delay in seconds"""

DELAYS: dict[str, Delays] = {
    "late gathers": {"gather": (1.0, 4e-3)},
    "late reductions": {"reduce": (1.0, 4e-3)},
    "slow computes": {"compute": (1.0, 4e-3)},
    "slow updates": {"update": (1.0, 2e-2), "compute": (0.1, 4e-3)},
    "anything": {"gather": (0.3, 6e-3), "reduce": (0.3, 6e-3), "compute": (0.3, 6e-3), "update": (0.5, 6e-3)},
}


@contextlib.contextmanager
def without_waits() -> Iterator[None]:
    """Ops run as soon as their stream is free, and no step looks for what it would notice of that itself."""
    never = property(lambda self: False, lambda self, value: None)
    with mock.patch.object(Scoreboard, "use", lambda *_: []), mock.patch.object(Session, "watch", never, create=True):
        yield


@contextlib.contextmanager
def delayed(delays: Delays, seed: int) -> Iterator[None]:
    """Sleeps before work on the streams, before computes begin and end, and before the optimizer writes."""
    numbers = {kind: random.Random(f"{seed}/{kind}") for kind in delays}  # a thread each: they run side by side

    def sleep(kind: str) -> None:
        if kind in delays:
            probability, longest = delays[kind]
            if numbers[kind].random() < probability:
                time.sleep(longest * numbers[kind].random())

    submit = HostStream.submit
    begin_write = StateMemory.begin_write
    begin = Session.begin_compute
    end = Session.end_compute

    def late_submit(self: HostStream, work: Work, waits: Sequence[Event], event: Any, label: str) -> None:
        def late() -> None:
            sleep(self._name)
            work()

        submit(self, late, waits, event, label)

    def late_begin(self: Session, *args: Any) -> Any:
        sleep("compute")
        return begin(self, *args)

    def late_end(self: Session) -> None:
        sleep("compute")
        end(self)

    def late_write(self: StateMemory) -> None:
        sleep("update")
        begin_write(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStream, "submit", late_submit)
        patch.setattr(Session, "begin_compute", late_begin)
        patch.setattr(Session, "end_compute", late_end)
        patch.setattr(StateMemory, "begin_write", late_write)
        yield


def sums(layer: Any) -> Tensor:
    return torch.stack([leaf.sum() for leaf in optree.tree_leaves(layer)])


def train(mesh: Any, name: str, schedule: str, delays: Delays, precision: ya.Precision) -> tuple[list[Any], Any]:
    """Three steps, with an evaluation and a map over layers between them."""
    problem = PROBLEMS[name]
    rank = mesh.get_local_rank()
    state = ya.init(problem.params(3), TX, mesh=mesh, precision=precision)
    step = ya.train_step(problem.loss, TX, schedule=SCHEDULES[schedule], microbatches=3)
    evaluate = ya.eval_step(problem.loss)
    out: list[Any] = []
    with delayed(delays, seed=rank):
        for number in range(3):
            state, metrics = step(state, batch_of(rank, seed=number))
            out += [metrics["loss"], metrics["grad_norm"], evaluate(state, batch_of(rank))["loss"]]
            out.append(ya.map_whole_layers(sums, state.params.layers))
        return out, ya.unshard(state)


PRECISIONS = {"fp32": ya.Precision(), "bf16": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)}
Case = tuple[str, str, str]
"""problem, schedule, precision"""


def with_and_without(mesh: Any, cases: Sequence[Case], delays: Delays) -> None:
    for name, schedule, precision in cases:
        expected, found = (train(mesh, name, schedule, d, PRECISIONS[precision]) for d in ({}, delays))
        compare(found, expected, 0.0, f"{name}, {schedule}, {precision}")


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(("which", "world"), [*((which, 2) for which in DELAYS), ("anything", 3)])
@pytest.mark.parametrize(
    "case",
    [
        ("tied", "zero3", "fp32"),
        ("base", "zero3-far", "bf16"),
        ("units", "zero2", "bf16"),
        ("twice", "zero3-remat-every", "fp32"),
        ("stacks", "zero3-demand", "fp32"),
    ],
)
def test_delays_change_nothing(mesh: Any, which: str, case: Case) -> None:
    with_and_without(mesh, [case], DELAYS[which])


@on_ranks(3)
def test_one_slow_rank_changes_nothing(mesh: Any) -> None:
    with_and_without(mesh, [("base", "zero3", "fp32")], DELAYS["anything"] if mesh.get_local_rank() == 1 else {})


@on_ranks(2)
@pytest.mark.parametrize("which", ["late gathers", "late reductions"])
def test_delays_would_show_a_missing_wait(mesh: Any, which: str) -> None:
    """The tests above can fail: numbers change where nobody waits for anybody."""
    expected = optree.tree_leaves(train(mesh, "base", "zero3", {}, ya.Precision()))
    with without_waits():
        long = dict.fromkeys(DELAYS[which], (1.0, 0.02))  # longer than a busy machine holds a thread up
        found = optree.tree_leaves(train(mesh, "base", "zero3", long, ya.Precision()))
        communicators(mesh).drain()
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
