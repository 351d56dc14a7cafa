"""Optimizers on sharded trees: one real rank, and the shards of every rank of larger worlds side by side."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from tests.optim.test_step import ALL, FUSED, Watch, clipped, foreign_sign
from tests.optim.trees import assert_close, bits, clone, defined_step
from yafsdp_fn import optim
from yafsdp_fn.api.sharding import init, unshard
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.optim.cutting import row_runs
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.leaf_mask import leaf_mask
from yafsdp_fn.params.markers import Stacked, Unit, frozen, without_markers
from yafsdp_fn.params.sharded import Origin, handles, placed, trainable
from yafsdp_fn.params.tree import Param
from yafsdp_fn.params.tree_layout import tree_layout

SHAPES = {
    "layers": Stacked({"a_norm": Param((3, 7)), "b": Unit({"w": Param((3, 5, 7))}), "w": Param((3, 7, 9))}),
    "head": {"bias": Param((3,)), "w": Param((7, 3)), "z": Param((1,))},
    "frozen": frozen({"w": Param((4, 4))}),
}


def matrices(path: str, param: Param) -> bool:
    """By path: a plain tree without its `Stacked` cannot tell a stack of vectors from a matrix."""
    return path.endswith("w")


def world(ranks: int, seed: int) -> list[Any]:
    """A tree of every rank's shards of the same values; `comms` reduces nothing."""
    layout, _ = tree_layout(SHAPES)
    generator = torch.Generator().manual_seed(seed)
    shards: list[list[Tensor]] = [[] for _ in range(ranks)]
    for entry, group in layout.groups:
        rows = []
        for _ in range(entry.length or 1):
            row = torch.zeros(group.layout.padded_numel(ranks))
            leaves = [torch.randn(shape, generator=generator) for shape in group.layout.shapes]
            for view, leaf in zip(group.layout.split(row), leaves, strict=True):
                view.copy_(leaf)
            rows.append(row)
        whole = torch.stack(rows) if entry.length else rows[0]
        for rank, part in enumerate(whole.chunk(ranks, -1)):
            shards[rank].append(part.contiguous())
    trees = []
    for rank in range(ranks):
        comms = Ranks(1, 1, ranks, torch.device("cpu"), rank)
        owner: Any = SimpleNamespace(comms=comms, generation=0)
        trees.append(trainable(placed(layout, shards[rank], Origin(owner, 0))))
    return trees


def whole(trees: list[Any]) -> list[Tensor]:
    """The logical leaves of all ranks' shards together, without padding."""
    out = []
    for per_rank in zip(*map(handles, trees), strict=True):
        for parts in zip(*(handle.group_leaves() for handle in per_rank), strict=True):
            flat = torch.cat([leaf for _, _, leaf in parts], -1)
            for row in flat.reshape(-1, flat.shape[-1]):
                out += parts[0][1].layout.split(row)
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_runs_are_the_leaf_mask(ranks: int) -> None:
    for tree in world(ranks, 0):
        masks = optree.tree_leaves(leaf_mask(matrices, tree))
        found = [(handle, group, leaf) for handle in handles(tree) for _, group, leaf in handle.group_leaves()]
        for (handle, group, leaf), mask in zip(found, masks, strict=True):
            runs = row_runs(matrices, handle, group, leaf.shape[-1])
            assert sum(length for _, length in runs) == leaf.shape[-1]
            assert all(a != b for (a, _), (b, _) in itertools.pairwise(runs))
            assert all(length % 8 == 0 for _, length in runs)  # aligned for vector loads
            expanded = torch.cat([torch.full((length,), value) for value, length in runs])
            there = leaf != 0  # gaps and padding may fall on either side
            assert torch.equal(expanded.expand(leaf.shape)[there], mask.expand(leaf.shape)[there])


@pytest.mark.parametrize("name", ["adamw", "adamw_masked", "momentum_l2_masked", "nesterov"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_world_size_gets_the_same_parameters(name: str, ranks: int) -> None:
    results = []
    for size in (1, ranks):
        params = world(size, 0)
        tx = MASKED.get(name) or FUSED[name]()
        states = [tx.init(shards) for shards in params]
        for step in range(4):
            for shards, grads, state in zip(params, world(size, step + 1), states, strict=True):
                optim.step_(tx, shards, grads, state, scale=torch.tensor(2.0), found_inf=torch.tensor(float(step == 2)))
        results.append(whole(params))
    assert len(results[0]) == 3 * 3 + 3
    assert_close(results[1], results[0], 1e-6)


MASKED = {
    "adamw_masked": optim.adamw(0.05, weight_decay=0.5, mask=matrices),
    "momentum_l2_masked": optim.chain(optim.add_decayed_weights(0.5, matrices), optim.sgd(0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", [*FUSED, "masked_whole", "clip_late"])
def test_a_state_of_one_rank_follows_the_plain_tree(name: str) -> None:
    tx = clipped(MASKED.get(name) or ALL[name]())
    state = init(SHAPES, tx, seed=3)
    params = unshard(trainable(state.params))
    opt_state = tx.init(params)
    for step in range(4):
        (grads,) = world(1, step + 1)
        params, opt_state = defined_step(tx, params, unshard(grads), opt_state, 2.0)
        state = state.apply_gradients(optree.tree_map(lambda g: g / 2, grads), tx)
    assert_close(unshard(trainable(state.params)), params, 1e-5)
    assert without_markers(SHAPES).keys() == state.params.keys()


@pytest.mark.parametrize("name", FUSED)
def test_padding_and_gaps_stay_zero(name: str) -> None:
    tx = MASKED.get(name) or FUSED[name]()
    (params,) = world(1, 0)
    gaps = [leaf == 0 for leaf in optree.tree_leaves(params)]
    assert any(gap.any() for gap in gaps)
    state = tx.init(params)
    for step in range(3):
        (grads,) = world(1, step + 1)
        optim.step_(tx, params, grads, state)
    assert all((leaf[gap] == 0).all() for leaf, gap in zip(optree.tree_leaves(params), gaps, strict=True))
    moments = [leaf for leaf in optree.tree_leaves(state) if leaf.ndim]
    assert all((leaf[gap] == 0).all() for leaf, gap in zip(moments, itertools.cycle(gaps), strict=False))


@pytest.mark.parametrize("name", ["adamw", "adamw_masked", "momentum_l2_masked"])
def test_a_step_on_shards_reads_nothing_back_and_allocates_nothing(name: str) -> None:
    tx = clipped(MASKED.get(name) or FUSED[name]())
    (params,) = world(1, 0)
    (grads,) = world(1, 1)
    state = tx.init(params)
    norm = global_norm(grads)
    with Watch() as watch:
        optim.step_(tx, params, grads, state, scale=torch.tensor(1.0), found_inf=torch.tensor(0.0), grad_norm=norm)
    assert "aten::_local_scalar_dense" not in watch.ops
    assert max(watch.fresh) <= 8


def test_an_optimizer_state_is_sharded_like_the_parameters() -> None:
    (params,) = world(1, 0)
    state = optim.scale_by_adam().init(params)
    assert optree.tree_structure(state.mu) == optree.tree_structure(params)
    assert bits(state.nu) == bits(optree.tree_map(torch.zeros_like, params))


class TestForeign:
    """A pair that declares nothing."""

    @pytest.mark.parametrize(
        "wrap",
        [lambda tx: tx, lambda tx: optim.chain(optim.sgd(0.1), optim.chain(tx)), lambda tx: optim.masked(tx, matrices)],
        ids=["bare", "in a chain", "masked"],
    )
    def test_is_given_whole_trees(self, wrap: Any) -> None:
        (params,), (grads,) = world(1, 0), world(1, 1)
        seen: list[Any] = []

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            seen.append(updates)
            return foreign_sign()[1](updates, state, params)

        tx = wrap((foreign_sign()[0], update))
        declared = wrap(optim.assume_elementwise(foreign_sign()))
        expected = clone(params)
        optim.step_(tx, params, clone(grads), optim.as_transformation(tx).init(params))
        optim.step_(declared, expected, clone(grads), optim.as_transformation(declared).init(expected))
        assert bits(params) == bits(expected)
        (whole,) = seen
        assert not handles(whole) and optree.tree_structure(whole) == optree.tree_structure(unshard(params))
