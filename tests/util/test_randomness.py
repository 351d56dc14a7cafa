"""Seeds of visits: they depend on five numbers, and leave torch's own generators alone."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import Model, assert_close, batch, dropout_block, embed, head, model, one_rank, with_block
from yafsdp_fn.util.randomness import VisitCounter, _counter, counting, seeded, visit_seed

CPU = torch.device("cpu")


def test_every_number_matters() -> None:
    keys = list(itertools.product((0, 1), repeat=5))
    seeds = [visit_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [visit_seed(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))  # in range


def test_a_seeded_block_draws_the_same_and_puts_the_state_back() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draws = []
    for seed in (5, 5, 6):
        with seeded(seed, CPU):
            draws.append(torch.rand(4))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_state_comes_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError), seeded(3, CPU):
        torch.rand(())
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_counter_numbers_visits_with_and_without_grad_apart() -> None:
    counter = VisitCounter(seed=7, step=2, microbatch=1, rank=3)
    first = counter.next_seed()
    with torch.no_grad():
        beside = counter.next_seed()
    second = counter.next_seed()
    assert (first, second) == (visit_seed(7, 2, 1, 0, 3), visit_seed(7, 2, 1, 1, 3))
    assert beside == first  # a session beside the step's own numbers them so, too


def test_counting_ends_with_its_block() -> None:
    assert _counter.get() is None
    outer = VisitCounter(0, 0)
    inner = VisitCounter(1, 0)
    with counting(outer):
        with counting(inner):
            assert _counter.get() is inner
        assert _counter.get() is outer
        with pytest.raises(KeyError), counting(inner):
            raise KeyError
        assert _counter.get() is outer
    assert _counter.get() is None


def test_plain_scans_outside_a_step_use_torchs_generator() -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    _, ys = ya.scan(lambda c, x: (c, torch.rand(())), torch.zeros(()), None, length=3)
    assert torch.equal(ys, want)


@pytest.mark.parametrize(
    ("unroll", "mapped"),
    [
        (1, False),
        (2, False),
        (1, True),
    ],
)
def test_a_plain_tree_draws_what_a_sharded_one_draws(unroll: int, mapped: bool) -> None:
    def loss(params: Model, b: Any) -> ya.Mean:
        first = optree.tree_map(lambda x: x * 1.0, params.embed) if mapped else params.embed
        x, _ = ya.scan(dropout_block, ya.apply(embed, first, b["tokens"]), params.layers, unroll=unroll)
        mean: ya.Mean = ya.apply(head, params.head, x, b["targets"])
        return mean

    params = ya.init(model(), ya.optim.sgd(0.1), mesh=one_rank()).params
    value = ya.value_and_grad(loss)
    want = value(ya.unshard(params), batch())[0]
    assert [value(params, batch())[0] for _ in range(2)] == [want, want]


@pytest.mark.parametrize("remat", [ya.schedules.remat.none, ya.schedules.remat.all])
def test_a_scan_over_plain_tensors_inside_a_block_draws_the_same_in_every_run(remat: Any) -> None:
    """In a block that keeps its graph, in one that runs first without grad and again with it, and in the plain loop."""

    def block(x: torch.Tensor, weights: Any) -> tuple[torch.Tensor, None]:
        x, _ = ya.scan(lambda x, scale: (torch.dropout(x * scale, 0.5, True), None), x, torch.full((2,), 1.1))
        return dropout_block(x, weights)

    params = ya.init(model(), ya.optim.sgd(0.1), mesh=one_rank()).params
    value = ya.value_and_grad(with_block(block), schedule=ya.schedules.zero3(remat=remat))
    want = value(ya.unshard(params), batch())
    for _ in range(2):
        assert_close(value(params, batch()), want)
