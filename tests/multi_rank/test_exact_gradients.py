"""Value and gradients of sharded losses equal those of the plain loop over the batches of all ranks.

At one rank they have equal bits; at more, 1e-6 relative to each leaf. Every function is called twice: the first call
runs on demand, the second runs its program.
"""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from tests.multi_rank.pool import Pool
from tests.multi_rank.problems import PROBLEMS, SCHEDULES, TX, batch_of, compare, global_batch, plain
from yafsdp_fn.comm import collectives

FEW = ("zero3", "zero3-remat-every", "zero2-remat-all")


def check(mesh: Any, name: str, layers: int, schedules: tuple[str, ...], microbatches: tuple[int, ...]) -> None:
    """One rank's part."""
    problem, ranks = PROBLEMS[name], mesh.size()
    state = ya.init(problem.params(layers), TX, mesh=mesh)
    batch = batch_of(mesh.get_local_rank())
    for parts in microbatches:
        # at one rank the plain loop has the same microbatches, so that it adds in the same order
        oracle = ya.value_and_grad(problem.loss, microbatches=parts if ranks == 1 else 1)
        value, grads = oracle(plain(problem.params(layers)), global_batch(ranks))
        # a unit that is visited twice adds up visits of all microbatches in one order, autograd in another
        exact = ranks == 1 and not (problem.revisits and parts > 1)
        for schedule in schedules:
            function = ya.value_and_grad(problem.loss, schedule=SCHEDULES[schedule], microbatches=parts)
            for call in ("on demand", "program"):
                what = f"{name}, {layers} layers, {parts} microbatches, {schedule}, {call}"
                got, got_grads = function(state.params, batch)
                compare(got, value, 0.0 if exact else 1e-6, f"{what}: value")
                compare(ya.unshard(got_grads), grads, 0.0 if exact else 1e-6, f"{what}: gradients")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_every_schedule_is_exact(pools: dict[int, Pool], world: int, layers: int) -> None:
    pools[world].run(check, "base", layers, tuple(SCHEDULES), (1, 3))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in ("base", "dropout")])
def test_every_kind_of_visit_is_exact(pools: dict[int, Pool], world: int, name: str) -> None:
    """Tied, frozen and grouped units, several stacks, reverse, consts, outputs, unrolled and unused visits."""
    pools[world].run(check, name, 7 if name == "unrolled" else 3, FEW, (1, 3))


def check_exchange(mesh: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "EXCHANGE_BYTES", 0)
        for name in ("base", "tied"):
            check(mesh, name, 3, FEW, (1, 3))


def test_direct_exchange_between_two_ranks_is_exact(pools: dict[int, Pool]) -> None:
    """What large shards take between two gloo ranks."""
    pools[2].run(check_exchange)
