"""The state: built layer by layer, donated step by step, a pytree that can be taken apart and put together."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import Model, assert_equal, batch, leaves, loss, model, one_rank, param

TX = ya.optim.adamw(1e-2)
State = ya.ShardedState


def fresh(seed: int = 0, **options: Any) -> State:
    return ya.init(model(), TX, mesh=one_rank(), seed=seed, **options)


def train() -> Any:
    return ya.train_step(loss, TX)


def snapshot(state: State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in leaves(state)]


# ---- what a state is


def test_a_fresh_state() -> None:
    state = fresh(seed=4)
    assert (state.step, state.seed) == (0, 4)
    assert state.mesh is one_rank()
    assert state.precision == ya.Precision()
    assert type(state.params) is Model
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3
    assert "Store" not in repr(state)


def test_a_donated_state_prints_as_donated() -> None:
    state = fresh()
    params = state.params
    text = repr(state)
    assert re.match(
        r"ShardedState\(step=0, seed=0\) on the mesh \(shard=\d\)\n.*\n  layers: .*; local shards torch\.", text
    )
    new, _ = train()(state, batch())
    assert re.fullmatch(r"ShardedState\(step=0, which was donated: a later state uses its memory.*", repr(state))
    assert "Sharded('layers', of a state that was donated: a later state uses" in repr(params)
    assert "donated" not in repr(new)


# ---- a pytree


@pytest.mark.parametrize("registry", [optree, torch_pytree])
def test_a_round_trip_is_the_same_state(registry: Any) -> None:
    state = fresh(seed=3)
    step = train()
    state, _ = step(state, batch())
    flat, spec = registry.tree_flatten(state)
    again = registry.tree_unflatten(spec, flat) if registry is optree else registry.tree_unflatten(flat, spec)
    assert isinstance(again, State)
    assert (again.step, again.seed, again.generation) == (1, 3, state.generation)
    assert again.memory is state.memory
    assert again.check() is again
    twin = state.copy()
    moved, _ = step(again, batch())
    expected, _ = step(twin, batch())
    assert_equal(moved, expected)
    with pytest.raises(RuntimeError, match="donated"):  # the same leaves: the same memory
        step(state, batch())


@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_steps_and_seeds_are_no_leaves(kind: str) -> None:
    state: Any = fresh(seed=3) if kind == "sharded" else ya.PlainState.create(model(), TX, seed=3)
    state, _ = train()(state, batch())
    halved = optree.tree_map(lambda x: x / 2, state)
    assert (halved.step, halved.seed) == (1, 3)


def test_replaced_leaves_are_adopted_and_not_written() -> None:
    state = fresh()
    step = train()
    state, _ = step(state, batch())
    average = optree.tree_map(lambda x: x / 2, state.params)
    mixed = dataclasses.replace(state, params=state.params._replace(head=average.head))
    plain = ya.unshard(state)._replace(head=ya.unshard(average).head)
    got = ya.eval_step(loss)(mixed, batch())["loss"]
    assert torch.equal(got, ya.eval_step(loss)(plain, batch())["loss"])
    before = average.head.leaves[0].clone()
    kept = snapshot(state)
    moments = [leaf.clone() for leaf in leaves(state.opt_state)]
    moved, _ = step(mixed, batch())
    assert torch.equal(average.head.leaves[0], before)
    assert_equal(kept, state)
    assert_equal(moments, state.opt_state)
    assert not torch.equal(leaves(moved)[0], kept[0])
    step(mixed, batch())  # what was adopted is not donated: its memory is the new state's alone


def test_leaves_in_another_dtype_come_back_in_the_masters() -> None:
    state = fresh()
    doubles = optree.tree_map(lambda x: x.double(), state.params)
    assert_equal(dataclasses.replace(state, params=doubles).check(), state)


# ---- shard, unshard


def test_unshard_gives_back_what_was_sharded() -> None:
    tree = {
        "a": [torch.rand(3), None],
        "b": ya.Stacked({"w": torch.rand(4, 2, 3), "v": torch.rand(4)}),
        "c": torch.rand(()),
    }
    state = ya.shard(tree, TX, mesh=one_rank())
    assert_equal(state, ya.params.without_markers(tree))
    assert_equal(ya.unshard(state.params["b"]), tree["b"].tree)
    whole = ya.unshard(state)
    whole["a"][0].zero_()
    whole["b"]["w"].zero_()
    assert_equal(state, ya.params.without_markers(tree))  # copies


def test_unshard_of_plain_trees_is_the_tree() -> None:
    tree = {"a": torch.ones(2)}
    assert ya.unshard(tree)["a"] is tree["a"]


# ---- the plain state


@on_ranks(1, 2)
def test_a_plain_state_on_a_part_of_a_batch_is_warned_of(mesh: Any) -> None:
    """Of several ranks, each of which would train by itself; the whole batch is right."""
    step = ya.train_step(loss, TX)
    state = ya.PlainState.create(model(), TX)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(state, batch())
        assert told == []
        step(state, ya.shard_batch(batch(), mesh))
    assert ["their states drift apart" in str(each.message) for each in told] == [True] * (mesh.size() - 1)


def test_a_plain_state_is_a_pytree_and_steps_out_of_place() -> None:
    tree = {"w": param(3), "f": ya.frozen(param(2)), "s": ya.Stacked({"w": param(2, 3), "f": ya.frozen(param(2, 1))})}
    tx = ya.optim.sgd(0.5)
    state = ya.PlainState.create(tree, tx, seed=2)
    again = torch_pytree.tree_map(lambda x: x, state)
    assert (again.step, again.seed) == (0, 2)
    assert isinstance(again, ya.PlainState)
    before = [leaf.clone() for leaf in optree.tree_leaves(state.params)]
    grads = optree.tree_map(torch.ones_like, state.params)
    moved = state.apply_gradients(grads, tx)
    assert moved.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, optree.tree_leaves(state.params), strict=True))
    whole = ya.params.without_markers(moved.params)
    old = ya.params.without_markers(state.params)
    assert torch.equal(whole["w"], old["w"] - 0.5)
    assert torch.equal(whole["s"]["w"], old["s"]["w"] - 0.5)
    assert torch.equal(whole["f"], old["f"])
    assert torch.equal(whole["s"]["f"], old["s"]["f"])


def test_a_plain_state_takes_copies() -> None:
    tensors = {"w": torch.ones(3), "lazy": ya.Lazy((2,), torch.float32, lambda layer: torch.zeros(2))}
    state = ya.PlainState.create(tensors, TX)
    state.params["w"].add_(1)
    assert tensors["w"].eq(1).all()
    assert state.params["lazy"].shape == (2,)
