"""The life of a state whose slots hold weights from one step to the next, and whose programs update it.

A history is a list of actions on one state. It is lived with the optimizer in the programs, and without it on copies
that know nothing of what came before; after every action parameters, optimizer state and what the action gave must have
the same bits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import bits, same
from tests.harness.histories import ACTIONS, Life, Planned, Setting
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.runtime.state import StepUpdates
from yafsdp_fn.schedules import Gather, Op

Mesh = Any
WORLDS = on_ranks(1, 2)


Seen = list[tuple[str, list[Tensor]]]
"""Actions, and the tensors after each."""


def live(setting: Setting, update: bool, copies: bool, history: list[str], folder: Path) -> Seen:
    """What is seen after each action. copies: each begins with a copy of the state, so that nothing is carried."""
    life = Life(setting, update, folder)
    seen = []
    for action in ["step", "step", *history, "step", "step"]:
        life.state = life.state.copy() if copies else life.state
        out = ACTIONS[action](life)
        tensors = optree.tree_leaves((out, life.state.params, life.state.opt_state))
        seen.append((action, [leaf.clone() for leaf in tensors if isinstance(leaf, Tensor)]))
    program = life.step.program(life.state)
    assert program.has_updates is update
    assert copies or not update or bool(program.carried())
    return seen


def assert_same(found: Seen, expected: Seen, what: str) -> None:
    for (action, tensors), (_, others) in zip(found, expected, strict=True):
        assert len(tensors) == len(others)
        for a, b in zip(tensors, others, strict=True):
            assert torch.equal(a, b) or bool(a.isnan() & b.isnan()), f"{action} {what}"


def drawn(seed: int, length: int) -> list[str]:
    return random.Random(seed).choices(list(ACTIONS), k=length)


BF16 = torch.bfloat16
SETTINGS = [
    Setting("shard", "zero2", True, "frozen"),
    Setting("shard", "zero2", False, "frozen", ya.Precision(compute=BF16)),
    Setting("shard", "zero3", False, "pinned"),
    Setting("shard", "zero3", True, "pinned", ya.Precision(compute=BF16, reduce=BF16)),
    Setting("shard", "resident", False, "frozen", ya.Precision(reduce=BF16, accumulate=torch.float32)),
    Setting("shard", "zero1", False, "pinned", ya.Precision(compute=BF16, reduce=BF16)),
]
FOUR = [
    Setting("copies", "ddp", False, "pinned"),
    Setting("replicate", "hsdp", True, "frozen", ya.Precision(compute=BF16)),
    Setting("nodes", "hpz", False, "pinned", ya.Precision(reduce=BF16, accumulate=torch.float32)),
    Setting("replicate-nodes", "hsdp", False, "frozen"),
]
OF_WORLD = {1: SETTINGS[::2], 2: SETTINGS[1::2], 4: FOUR[1:3]}
CASES = [
    pytest.param(world, each, id=f"{world}-{at}", marks=[pytest.mark.nightly] if world != 2 or at else [])
    for world, some in OF_WORLD.items()
    for at, each in enumerate(some)
]


@on_ranks()
@pytest.mark.parametrize(("world", "setting"), CASES)
def test_every_history_ends_in_the_same_bits(mesh: Any, setting: Setting, tmp_path: Path) -> None:
    """Every action once, in an order of its own for each setting; alone, then some drawn at random. Of four ranks with
    four settings, each does half of them."""
    world = mesh.size()
    seed = 10 * world + (SETTINGS if world < 4 else FOUR).index(setting)
    every = random.Random(seed).sample(list(ACTIONS), len(ACTIONS) // (2 if world == 4 else 1))
    histories = [every, *(drawn(seed + number, 12) for number in range(2 if world == 1 else 0))]
    for number, history in enumerate(histories):
        folder = tmp_path / str(number)
        expected = live(setting, False, True, history, folder / "copies")
        for update in (True, False) if setting.mesh == "shard" and setting.kind == "frozen" else (True,):
            found = live(setting, update, False, history, folder / str(update))
            assert_same(found, expected, f"of {history}, update={update}")


# ---- how often weights are gathered


@contextmanager
def gathers() -> Iterator[list[int]]:
    """The units that are gathered, as gathers are issued."""
    found: list[int] = []
    issue = Session.issue

    def counting(self: Session, op: Op, *why: Any, **number: Any) -> None:
        found.extend(op.units if isinstance(op, Gather) else ())
        issue(self, op, *why, **number)

    with mock.patch.object(Session, "issue", counting):
        yield found


CARRIED: dict[str, int] = {
    "step": 0,
    "map_whole_layers": 0,
    "unshard": 0,
    "kept": 0,  # the step went on elsewhere, the old state has its slots
    "gradients": 0,  # by zero2, too: every unit in its slot, in the same version
    "other step": 0,
    "evaluation in the loss": 0,  # in slots of its own
    "frozen written": 3,  # layers of one stack
    "failed forward": 8,
    "failed backward": 8,
    "loaded": 8,
    "replaced": 8,
    "loaded into another": 8,
}
"""Action -> gathers that the next step needs beside its program's: of the first units, and of all that is frozen."""


@WORLDS
def test_what_is_lost_is_gathered_once(_: Mesh, tmp_path: Path) -> None:
    life = Life(Setting("shard", "zero2", False, "frozen"), True, tmp_path)
    for action in ("step", "step", "other step", "other step", "kept", "gradients", "gradients", "step"):
        ACTIONS[action](life)
    program = life.step.program(life.state)
    assert len(program.carried()) == 8
    for action, again in CARRIED.items():
        ACTIONS[action](life)
        for more in (again, 0):
            with gathers() as found:
                life.take(life.step)
            assert len(found) == program.count(Gather) + more, action


# ---- updates during the backward


GONE = "was being written when its step was interrupted; load a checkpoint into a new state"
USES: list[Callable[[Life], Any]] = [
    lambda life: life.take(life.step),
    lambda life: life.evaluate(life.state, life.batch()),
    lambda life: life.gradients(life.state.params, life.batch()),
    lambda life: ya.unshard(life.state),
    lambda life: life.state.copy(),
]


def failing_after(update: Callable[..., None], error: type[BaseException]) -> Callable[..., None]:
    """An update that is written, and then raises."""

    def written(self: StepUpdates, units: tuple[int, ...], part: int) -> None:
        update(self, units, part)
        raise error

    return written


@pytest.mark.sampled
@WORLDS
@pytest.mark.parametrize("clips", [True, False])
def test_a_failure_in_the_backward(_: Mesh, clips: bool, tmp_path: Path) -> None:
    """One at the end of the backward changes nothing; one after the first update leaves no state."""
    for builder, error in itertools.product(("zero2", "zero3"), (Planned, KeyboardInterrupt)):
        life = Life(Setting("shard", builder, clips, "pinned"), True, tmp_path)
        for _ in range(3):
            life.take(life.step)
        copy = life.state.copy()
        before = bits(life.state)
        with life.told(failure=("end of the backward", error)), pytest.raises(error):
            life.step(life.state, batch_of(life.rank))
        assert same(bits(life.state), before)
        expected, _ = life.train()(copy.copy(), batch_of(life.rank))
        old = life.state
        life.state, _ = life.step(life.state, batch_of(life.rank))
        assert same(bits(life.state), bits(expected))
        with pytest.raises(RuntimeError, match="was donated"):
            life.step(old, batch_of(life.rank))
        kept = life.state.copy()
        broken = mock.patch.object(StepUpdates, "update", failing_after(StepUpdates.update, error))
        with broken, pytest.raises(error):
            life.step(life.state, batch_of(life.rank))
        for use in USES:
            with pytest.raises(RuntimeError, match=GONE):
                use(life)
        life.state = kept
        life.take(life.step)
