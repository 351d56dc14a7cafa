"""Optimizers on the sharded trees of one rank."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

from tests.harness.watching import Watch
from tests.optim.test_step import ALL, FUSED, clipped
from tests.optim.trees import assert_close, defined_step
from yafsdp_fn import optim
from yafsdp_fn.api.sharding import init, unshard
from yafsdp_fn.optim.cutting import row_runs
from yafsdp_fn.params.algebra import global_norm, normal_like
from yafsdp_fn.params.markers import Stacked, Unit, frozen, without_markers
from yafsdp_fn.params.sharded import handles, trainable
from yafsdp_fn.params.tree import Param

SHAPES = {
    "layers": Stacked({"a_norm": Param((3, 7)), "b": Unit({"w": Param((3, 5, 7))}), "w": Param((3, 7, 9))}),
    "head": {"bias": Param((3,)), "w": Param((7, 3)), "z": Param((1,))},
    "frozen": frozen({"w": Param((4, 4))}),
}


def matrices(path: str, param: Param) -> bool:
    """By path: a plain tree without its `Stacked` cannot tell a stack of vectors from a matrix."""
    return path.endswith("w")


def drawn(seed: int) -> Any:
    """Shards like those of the parameters, with zeros where no leaf is."""
    return normal_like(seed, trainable(init(SHAPES).params))


MASKED = {
    "adamw_masked": optim.adamw(0.05, weight_decay=0.5, mask=matrices),
    "momentum_l2_masked": optim.chain(optim.add_decayed_weights(0.5, matrices), optim.sgd(0.05, momentum=0.9)),
}


def test_runs_are_aligned_for_vector_loads() -> None:
    for handle in handles(drawn(0)):
        for _, group, leaf in handle.group_leaves():
            runs = row_runs(matrices, handle, group, leaf.shape[-1])
            assert all(length % 8 == 0 for _, length in runs)


@pytest.mark.parametrize("name", [*FUSED, "masked_whole", "clip_late"])
def test_a_state_of_one_rank_follows_the_plain_tree(name: str) -> None:
    tx = clipped(MASKED.get(name) or ALL[name]())
    state = init(SHAPES, tx, seed=3)
    params = unshard(trainable(state.params))
    opt_state = tx.init(params)
    for step in range(4):
        grads = drawn(step + 1)
        params, opt_state = defined_step(tx, params, unshard(grads), opt_state, 2.0)
        state = state.apply_gradients(optree.tree_map(lambda g: g / 2, grads), tx)
    assert_close(unshard(trainable(state.params)), params, 1e-5)
    assert without_markers(SHAPES).keys() == state.params.keys()


@pytest.mark.parametrize("name", ["adamw", "adamw_masked", "momentum_l2_masked"])
def test_a_step_on_shards_reads_nothing_back_and_allocates_nothing(name: str) -> None:
    tx = clipped(MASKED.get(name) or FUSED[name]())
    params, grads = drawn(0), drawn(1)
    state = tx.init(params)
    norm = global_norm(grads)
    with Watch() as watch:
        optim.step_(tx, params, grads, state, scale=torch.tensor(1.0), found_inf=torch.tensor(0.0), grad_norm=norm)
    assert "aten::_local_scalar_dense" not in watch.ops
    assert max(watch.fresh) <= 8
