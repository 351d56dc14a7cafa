"""Optimizer states on the host, as a GPU would fetch and return them: nothing is used that no event orders."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import optree
import pytest

import yafsdp_fn as ya
from tests.cuda.days import MESHES
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import Log, findings, without_each_wait
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.formats import loss, tree
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of
from tests.optim.test_on_host import OPTIMIZERS, SCHEDULES, on_host
from yafsdp_fn.communication.formats import Wire
from yafsdp_fn.optim.on_host import HostStates


def day(mesh: Any, tx: Any, schedule: str) -> list[float]:
    """Sums of what a rank of four has after some steps."""
    state = ya.init(tree(Wire()), tx, mesh=mesh)
    step = ya.train_step(loss, tx, schedule=SCHEDULES[schedule])
    device = state.memory.comms.device
    assert all(leaf.device.type == "cpu" for leaf in on_host(state))
    for number in range(3):
        batch = optree.tree_map(lambda leaf: leaf.to(device), batch_of(0, seed=number))
        state, _ = step(state, batch)
    return [float(leaf.double().sum()) for leaf in optree.tree_leaves([state.params, state.opt_state])]


def seen(optimizer: str, schedule: str) -> tuple[list[float], Log]:
    with fake_cuda() as device, rank_of(MESHES["shard"]) as mesh:
        return day(mesh, OPTIMIZERS[optimizer][1], schedule), device.log


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("adamw", "updates inside"),
        ("no kernel", "zero2"),
        ("muon", "updates inside"),
        nightly("soap", "zero3"),
        nightly("beside muon", "updates inside"),
        nightly("in 8 bits", "zero1"),
    ],
)
@in_child_process
def test_a_day_without_races(optimizer: str, schedule: str) -> None:
    """Numbers are those of states on the device."""
    found, log = seen(optimizer, schedule)
    assert not findings(log), "\n".join(map(str, findings(log)))
    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        assert found == day(mesh, OPTIMIZERS[optimizer][0], schedule)


# ---- mistakes, made on purpose


@in_child_process
def test_waits_are_missed_or_implied_by_others() -> None:
    """What becomes of a day without one of its waits, for each of them."""
    log = seen("adamw", "updates inside")[1]
    verdicts = Counter(verdict for _, verdict in without_each_wait(log))
    assert verdicts["found"] > 20 and verdicts["idle"] < verdicts["found"] / 10, verdicts


def copied_at_once(self: Any, label: str, pairs: Any, reads: Any, writes: Any) -> None:
    """The copies of `HostStates`, which wait for nothing."""
    for to, source in pairs:
        self._stream.submit(functools.partial(to.copy_, source), (), self._memory.comms.event(), label)


@in_child_process
def test_uses_that_are_not_ordered_are_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStates, "_copy", copied_at_once)
        log = seen("adamw", "updates inside")[1]
    assert "race" in [each.kind for each in findings(log)]


@in_child_process
def test_a_step_ends_when_states_are_back() -> None:
    """What comes after the last copies of each step."""
    _, log = seen("adamw", "updates inside")
    (offload,) = {entry.stream for entry in log.entries if entry.kind == "use" and "return states" in entry.text}
    kinds = [entry.kind for entry in log.entries if entry.stream == offload and entry.kind in ("use", "drain")]
    after_copies = [after for before, after in itertools.pairwise(kinds) if (before, after) == ("use", "drain")]
    assert len(after_copies) == 3
