"""Handles: pytree nodes whose leaves are flat shards, and that say so when used as anything else."""

from __future__ import annotations

import re
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

import yafsdp_fn as ya
from tests.harness.small import Model, model, one_rank, param
from yafsdp_fn.params.sharded import handles, is_sharded, trainable

TX = ya.optim.sgd(0.1)


def params(seed: int = 0) -> Model:
    found: Model = ya.init(model(), TX, mesh=one_rank(), seed=seed).params
    return found


def test_the_container_is_the_users() -> None:
    found = params()
    assert type(found) is Model
    assert all(is_sharded(node) for node in found)
    assert [handle.entry.name for handle in handles({"x": [found, 3]})] == ["embed", "layers", "head"]


def test_leaves_are_flat_shards() -> None:
    leaves = optree.tree_leaves(params())
    assert [tuple(leaf.shape) for leaf in leaves] == [(56,), (3, 88), (64,)]
    assert re.fullmatch(r"Sharded\('layers', .*\(3, .*; local shards torch.float32 \(3, 88\)\)", repr(params().layers))
    assert repr(params().embed).endswith("; local shards torch.float32 (56,))")


def test_structures_compare_layouts_not_states() -> None:
    one = params(0)
    two = params(1)
    assert optree.tree_structure(one) == optree.tree_structure(two)
    assert torch_pytree.tree_structure(one) == torch_pytree.tree_structure(two)
    assert hash(optree.tree_structure(one)) == hash(optree.tree_structure(two))
    other = ya.init(model(count=4), TX, mesh=one_rank()).params
    assert optree.tree_structure(one) != optree.tree_structure(other)


def test_what_is_not_there_is_not_there() -> None:
    assert not hasattr(params().embed, "__array__")
    assert not hasattr(params().embed, "weight")


def frozen_tree() -> Any:
    return {
        "layers": ya.Stacked({"w": param(2, 3), "base": ya.frozen(param(2, 4)), "u": ya.Unit(param(2, 5))}),
        "fixed": ya.frozen({"w": param(3)}),
        "head": param(2),
    }


def test_trainable_leaves_out_what_is_frozen() -> None:
    sharded = trainable(ya.init(frozen_tree(), TX, mesh=one_rank()).params)
    assert [tuple(leaf.shape) for leaf in optree.tree_leaves(sharded)] == [(8,), (2, 8), (2, 8)]
    plain = trainable(ya.PlainState.create(frozen_tree(), TX).params)
    assert [tuple(leaf.shape) for leaf in optree.tree_leaves(plain)] == [(2,), (2, 5), (2, 3)]
    assert plain["fixed"] is None


# ---- leaf_mask


def asked(tree: Any) -> tuple[list[tuple[str, tuple[int, ...]]], Any]:
    """What `leaf_mask` asks its rule, and its result."""
    seen = []

    def rule(path: str, p: ya.Param) -> bool:
        seen.append((path, p.shape))
        return len(p.shape) > 1

    mask = ya.params.leaf_mask(rule, tree)
    return sorted(seen), mask


def test_a_mask_covers_exactly_the_leaves_that_pass() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    mask = asked(state.params)[1]
    for handle, masked in zip(handles(state.params), handles(mask), strict=True):
        (group,) = handle.entry.groups
        bits = masked.leaves[0]
        assert bits.shape == handle.leaves[0].shape[-1:]
        for view, shape in zip(group.layout.split(bits), group.layout.shapes, strict=True):
            assert view.eq(len(shape) > 1).all()
        assert not any(gap.any() for gap in group.layout.gaps(bits))
    halved = optree.tree_map(lambda x, m: torch.where(m, x / 2, x), state.params, mask)
    whole = ya.unshard(halved)
    before = ya.unshard(state)
    assert torch.equal(whole.layers["up"], before.layers["up"] / 2)
    assert torch.equal(whole.layers["bias"], before.layers["bias"])


def test_masks_of_groups() -> None:
    tree = trainable(ya.init(frozen_tree(), TX, mesh=one_rank()).params)
    mask = ya.params.leaf_mask(lambda path, p: path == "layers.u", tree)
    assert [int(leaf.sum()) for leaf in optree.tree_leaves(mask)] == [0, 5, 0]
