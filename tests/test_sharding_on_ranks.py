"""ya.shard of a state: another mesh, optimizer or grouping; the leaves stay, and with them their moments."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pool
from tests.harness.problems import TX, base_loss, base_params, pinned

HYBRID: dict[str, int] = {"replicate": 2}


def trained(mesh: Any) -> ya.ShardedState:
    state, step = ya.init(base_params(3), TX, mesh=mesh), ya.train_step(base_loss, TX)
    for _ in range(2):
        state, _ = step(state, batch_of(mesh.get_rank()))
    return state


def whole(state: ya.ShardedState) -> Any:
    """All that trains, in one order whatever the grouping."""
    return [
        torch.cat([leaf.reshape(-1) for leaf in optree.tree_leaves(ya.unshard(tree))]).sort()[0]
        for tree in (state.params, state.opt_state)
    ]


def goes_on(state: ya.ShardedState, other: ya.ShardedState, batch: Any) -> None:
    step, theirs = ya.train_step(base_loss, TX), ya.train_step(base_loss, TX)
    for _ in range(3):
        (state, one), (other, two) = step(state, batch), theirs(other, batch)
        compare(two["loss"], one["loss"], 1e-5, "the loss")
    compare(ya.unshard(other.params), ya.unshard(state.params), 1e-5, "parameters")


def resharded(mesh: Any, to: str) -> None:
    state = trained(mesh)
    grouped = base_params(3)._replace(layers=ya.Stacked(pinned(base_params(3).layers.tree, "bias")))
    other = {
        "mesh": lambda: ya.shard(state, TX, mesh=ya.mesh(device="cpu", **HYBRID)),
        "grouping": lambda: ya.shard(state, TX, like=grouped),
        "both": lambda: ya.shard(state, TX, like=grouped, mesh=ya.mesh(device="cpu", **HYBRID)),
    }[to]()
    assert other.step == 2
    compare(whole(other), whole(state), 0.0, "values and moments")
    goes_on(state, other, batch_of(mesh.get_rank()))


@pytest.mark.parametrize("to", ["mesh", "grouping", "both"])
def test_a_state_goes_on_elsewhere_with_its_moments(pools: dict[int, Pool], to: str) -> None:
    pools[2].run(resharded, to)


def begun_anew(mesh: Any) -> None:
    """The params alone, with another optimizer: the values stay, the optimizer's state is a first one."""
    state, sgd = trained(mesh), ya.optim.sgd(0.1, momentum=0.9)
    other = ya.shard(state.params, sgd)
    assert other.step == 0
    compare(ya.unshard(other), ya.unshard(state), 0.0, "values")
    assert not any(leaf.any() for leaf in optree.tree_leaves(other.opt_state))
    before = ya.unshard(state)
    other, metrics = ya.train_step(base_loss, sgd)(other, batch_of(mesh.get_rank()))
    assert metrics["skipped"] == 0
    compare(ya.unshard(state), before, 0.0, "the old state is left as it was")
    other = ya.shard(state, ya.optim.chain(ya.optim.clip_by_global_norm(1.0), sgd))
    assert other.step == 2
    compare(ya.unshard(other), before, 0.0, "a state with another optimizer")


def test_params_begin_anew_with_another_optimizer(pools: dict[int, Pool]) -> None:
    pools[2].run(begun_anew)


def teacher(mesh: Any) -> None:
    tensors = ya.params.without_markers(ya.PlainState.create(base_params(3), TX).params)
    tree = tensors._replace(layers=ya.Stacked(tensors.layers))
    state = ya.shard(tree, mesh=mesh)
    expected = ya.eval_step(base_loss)(ya.init(base_params(3), TX, mesh=mesh), batch_of(mesh.get_rank()))
    compare(ya.eval_step(base_loss)(state, batch_of(mesh.get_rank())), expected, 0.0, "a teacher")
    with pytest.raises(ValueError, match="this state was made without an optimizer"):
        ya.train_step(base_loss, TX)(state, batch_of(mesh.get_rank()))


@pytest.mark.parametrize("world", [1, 2])
def test_without_an_optimizer_a_state_is_evaluated_only(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(teacher)
