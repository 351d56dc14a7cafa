"""A number for the bits of a state: the same at every number of ranks; replicas that differ are named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.failing import batch, loss, params, state
from tests.harness.groups import outcome
from tests.harness.marks import nightly
from tests.harness.meshes import made, on
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.params.sharded import handles

TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(ya.optim.linear_schedule(0.1, 0.0, 9)))
LOW = ya.Precision(compute=torch.bfloat16, reduce=torch.float32)


def numbers(mesh: Any) -> list[int]:
    """Of a fresh state, of another seed, one with a bit changed, one a step later; in two precisions."""
    found = []
    for precision in (ya.Precision(), LOW):
        for seed in (0, 1):
            found.append(ya.checksum(ya.init(params(), TX, mesh=mesh, seed=seed, precision=precision)))
        now = state(mesh, TX, precision)
        if now.memory.comms.rank == 0:
            flip(handles(now.params)[0].leaves[0])
        found.append(ya.checksum(now))
    found.append(ya.checksum(ya.init(params(), mesh=mesh)))
    return found


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """One bit of the first element, in memory: no version of a tensor changes."""
    tensor.detach().view(-1)[:1].data.view(torch.int32).bitwise_xor_(1 << bit)


@pytest.fixture(scope="module")
def at_one(pools: Pools) -> list[str]:
    (found,) = pools[1].run(numbers)
    return found


@pytest.mark.parametrize("world, mesh", [nightly(2, "shard"), (3, "shard"), (4, "replicate"), nightly(4, "nodes")])
def test_it_is_the_same_at_every_number_of_ranks(pools: Pools, at_one: list[str], world: int, mesh: str) -> None:
    one = at_one
    assert one[:3] == one[3:6] and len(set(one)) == 3 and one[6] == one[0]  # masters are alike, moments still zero
    assert pools[world].run(on, mesh, numbers) == [one] * world


def trained(mesh: Any, steps: int) -> list[int]:
    """After each of some steps on equal batches: the loss is the same at any number of copies."""
    step = ya.train_step(loss, TX)
    now = state(mesh, TX)
    found = []
    for _ in range(steps):
        now, _ = step(now, batch())
        found.append(ya.checksum(now))
        assert ya.checksum(now) == found[-1]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_copies_that_train_are_alike_and_all_ranks_get_one_number(pools: Pools, world: int) -> None:
    for mesh in ("shard", "copies"):
        first, *others = pools[world].run(on, mesh, trained, 2)
        assert all(other == first for other in others)
        assert len(set(first)) == 2


def master(now: ya.ShardedState) -> None:
    flip(now.memory.master.rows[2])


def copy(now: ya.ShardedState) -> None:
    now.memory.working.rows[2].view(torch.int16).bitwise_xor_(1)


def moment(now: ya.ShardedState) -> None:
    flip(handles(now.opt_state)[0].leaves[0], bit=30)


def count(now: ya.ShardedState) -> None:
    next(x for x in optree.tree_leaves(now.opt_state) if isinstance(x, torch.Tensor) and x.ndim == 0).add_(1)


FAULTS: dict[str, tuple[Callable[[ya.ShardedState], None], str]] = {
    "master": (master, "layers[0]: "),
    "copy": (copy, "the working copy of layers[0]: "),
    "moment": (moment, "opt_state.1.0.mu.embed of embed: "),
    "count": (count, "opt_state.1.0.count: "),
}


def damaged(mesh: Any, rank: int) -> list[str]:
    found = []
    for damage, _ in FAULTS.values():
        now = state(mesh, TX, LOW)
        now, _ = ya.train_step(loss, TX)(now, batch())
        if mesh.get_rank() == rank:
            damage(now)
        found.append(outcome(functools.partial(ya.checksum, now)))
    return found


@on_ranks(3)
def test_of_three_copies_the_odd_one_is_named(_: Any) -> None:
    for (_, name), text in zip(FAULTS.values(), damaged(made("copies"), 1), strict=True):
        assert "Corrupted: ranks that should hold the same bits do not:" in text, text
        assert f"\n  {name}rank 1 differs from ranks 0, 2\n" in text, text


@on_ranks(4)
def test_of_two_copies_both_are(_: Any) -> None:
    """Four ranks, two copies in two shards each: ranks 1 and 3 have the same shard."""
    texts = damaged(made("replicate"), 3)
    for (_, name), text in zip(list(FAULTS.values())[:2], texts[:2], strict=True):
        assert f"\n  {name}rank 1 and rank 3 differ\n" in text, text
    assert "\n  opt_state.1.0.count: rank 3 differs from ranks 0-2\n" in texts[3], texts[3]


@on_ranks(3)
def test_another_step_on_one_rank(mesh: Any) -> None:
    now = state(mesh, TX)
    text = outcome(lambda: ya.checksum(dataclasses.replace(now, step=7 * (mesh.get_rank() == 2))))
    assert "\n  step: rank 2 differs from ranks 0-1\n" in text, text
