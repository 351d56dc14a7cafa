"""ya.shard of a state: another mesh, optimizer or grouping; the leaves stay, and with them their moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.groups import outcome
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import on_ranks
from tests.harness.problems import TX, base_loss, base_params, pinned

HYBRID: dict[str, int] = {"replicate": 2}


def trained(mesh: Any) -> ya.ShardedState:
    state = ya.init(base_params(3), TX, mesh=mesh)
    step = ya.train_step(base_loss, TX)
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
    step = ya.train_step(base_loss, TX)
    theirs = ya.train_step(base_loss, TX)
    for _ in range(3):
        (state, one), (other, two) = step(state, batch), theirs(other, batch)
        compare(two["loss"], one["loss"], 1e-5, "the loss")
    compare(other.params, state.params, 1e-5, "parameters")


@on_ranks(2)
@pytest.mark.parametrize("to", ["mesh", "grouping", "both"])
def test_a_state_goes_on_elsewhere_with_its_moments(mesh: Any, to: str) -> None:
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


@on_ranks(2)
def test_params_begin_anew_with_another_optimizer(mesh: Any) -> None:
    """The params alone, with another optimizer: the values stay, the optimizer's state is a first one."""
    state = trained(mesh)
    sgd = ya.optim.sgd(0.1, momentum=0.9)
    other = ya.shard(state.params, sgd)
    assert other.step == 0
    compare(other, state, 0.0, "values")
    assert not any(leaf.any() for leaf in optree.tree_leaves(other.opt_state))
    before = ya.unshard(state)
    other, metrics = ya.train_step(base_loss, sgd)(other, batch_of(mesh.get_rank()))
    assert metrics["skipped"] == 0
    compare(state, before, 0.0, "the old state is left as it was")
    other = ya.shard(state, ya.optim.chain(ya.optim.clip_by_global_norm(1.0), sgd))
    assert other.step == 2
    compare(other, before, 0.0, "a state with another optimizer")


@on_ranks(1, 2)
def test_without_an_optimizer_a_state_is_evaluated_only(mesh: Any) -> None:
    tensors = ya.params.without_markers(ya.PlainState.create(base_params(3), TX).params)
    tree = tensors._replace(layers=ya.Stacked(tensors.layers))
    state = ya.shard(tree, mesh=mesh)
    expected = ya.eval_step(base_loss)(ya.init(base_params(3), TX, mesh=mesh), batch_of(mesh.get_rank()))
    compare(ya.eval_step(base_loss)(state, batch_of(mesh.get_rank())), expected, 0.0, "a teacher")
    with pytest.raises(ValueError, match="this state was made without an optimizer"):
        ya.train_step(base_loss, TX)(state, batch_of(mesh.get_rank()))


DIFFERENT = {
    "head": "head.w differs:",
    "layer": "layers.w differs:",
    "pinned": "layers.pin differs:",
    "dtype": "head.w differs:",
    "like": "head.w differs:",
    "module": "1.bias differs:",
}


@on_ranks()
@pytest.mark.parametrize(("world", "how"), [(3 if how == "layer" else 2, how) for how in DIFFERENT])
def test_values_that_differ_between_ranks_are_told(mesh: Any, how: str) -> None:
    """What ranks with other values of one leaf say, and without the difference."""
    rank = mesh.get_rank()
    said = list[str]()
    for odd in (rank == 1, False):
        if how == "module":
            torch.manual_seed(1 if odd else 0)
            layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            torch.manual_seed(0)
            tree: Any = ya.functionalize(torch.nn.Sequential(torch.nn.Linear(2, 4), layers), layers="1")[0]
        else:
            tree = {"layers": ya.Stacked({"w": torch.ones(3, 4, 2), "pin": ya.Pinned(torch.ones(3, 2))}), "head": {}}
            tree["head"]["w"] = torch.arange(6.0).to(torch.bfloat16 if how == "dtype" and odd else torch.float32)
            if how == "head":
                tree["head"]["w"][5] += odd
            if how == "layer":
                tree["layers"].tree["w"][1, 0, 0] += odd
            if how == "pinned":
                tree["layers"].tree["pin"].tree[2] += odd
        like = None
        if how == "like":
            tree = {"head": {"w": torch.arange(8.0).view(2, 4) + int(odd)}}
            like = {"head": {"w": ya.Param((2, 4), split={"tensor": -1})}}
        said.append(outcome(lambda: ya.shard(tree, TX, mesh=mesh, like=like)))  # noqa: B023
    told, then = said
    assert "agreement.RanksDisagree: ranks disagree on the values to shard" in told, told
    assert DIFFERENT[how] in told
    assert "rank 1: torch." in told
    assert "from_rank_0=True" in told
    assert then == "returned"


@on_ranks(2)
@pytest.mark.parametrize("stages", [False, True])
def test_the_values_of_rank_0_are_sent_to_all(_: Any, stages: bool) -> None:
    """Each rank has values of its own, and lazy leaves that only rank 0 can load."""
    mesh = ya.mesh(device="cpu", **({"stage": 2, "shard": 1} if stages else {"shard": 1, "tensor": 2}))
    rank = 0
    rank = torch.distributed.get_rank()

    def load(layer: int | None) -> torch.Tensor:
        assert rank == 0
        return torch.full((3, 2), float(layer or 0))

    values = torch.arange(8, dtype=torch.bfloat16) + 100 * rank
    layers = {"w": ya.Lazy((2, 3, 2), torch.float32, load), "pin": ya.Pinned(torch.full((2, 3), 7.0 + rank))}
    tree: Any = {"layers": ya.Stacked(layers), "head": {"w": values, "b": torch.tensor(3.0 + rank)}}
    assign = ya.schedules.Assignment(units=((0,), (0,), (1,), (1,)), homes=(0, 1)) if stages else None
    state = ya.shard(tree, TX, mesh=mesh, from_rank_0=True, stages=assign)
    found = ya.unshard(state.params)
    assert torch.equal(found["layers"]["w"], torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]))
    assert torch.equal(found["layers"]["pin"], torch.full((2, 3), 7.0))
    assert torch.equal(found["head"]["w"].float(), torch.arange(8.0))
    assert found["head"]["b"] == 3
    with pytest.raises(ValueError, match="of a state every rank has a part of its own"):
        ya.shard(state, TX, from_rank_0=True)


# ---- another optimizer, and a larger vocabulary


def states_of(tree: Any, kind: type) -> list[Any]:
    found = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


SLOW = ya.optim.linear_schedule(1e-3, 1e-2, 10)
OTHERS = {
    "clipping": ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-3)),
    "a schedule": ya.optim.adamw(SLOW),
    "both, nested": ya.optim.chain(ya.optim.chain(ya.optim.clip(1.0), ya.optim.adamw(SLOW)), ya.optim.scale(0.5)),
}


@on_ranks(2)
@pytest.mark.parametrize("name", OTHERS)
def test_moments_are_carried_over_to_another_optimizer(mesh: Any, name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    plain = ya.optim.adamw(1e-3)
    other = OTHERS[name]
    state = ya.init(base_params(3), plain, mesh=mesh)
    step = ya.train_step(base_loss, plain)
    for _ in range(2):
        state, _ = step(state, batch_of(mesh.get_rank()))
    ya.checkpoint.save(f"{folder}/{name}", state)
    with pytest.raises(ya.errors.CheckpointError, match=r"the optimizer that saved it.*ya\.shard\(state, tx\)"):
        ya.checkpoint.load(f"{folder}/{name}", ya.init(base_params(3), ya.optim.chain(ya.optim.trace(0.9), plain)))
    loaded, _ = ya.checkpoint.load(f"{folder}/{name}", ya.init(base_params(3), plain, mesh=mesh))
    (want,) = states_of(state.opt_state, ya.optim.ScaleByAdamState)
    for begun in (ya.shard(loaded, other), ya.shard(ya.shard(loaded, other), plain)):  # there, and back
        (got,) = states_of(begun.opt_state, ya.optim.ScaleByAdamState)
        compare(got, want, 0.0, name)
        assert begun.step == 2
        assert want.count == got.count == 2


@on_ranks(2)
def test_parts_that_cannot_be_told_apart_begin_anew_with_a_warning(mesh: Any) -> None:
    one, two = (ya.optim.chain(*[ya.optim.trace(0.9)] * count, ya.optim.scale_by_adam()) for count in (1, 2))
    state, _ = ya.train_step(base_loss, one)(ya.init(base_params(3), one, mesh=mesh), batch_of(mesh.get_rank()))
    with pytest.warns(UserWarning, match="more or fewer parts of a kind than the state's, .* begin anew: TraceState$"):
        other = ya.shard(state, two)
    assert not any(leaf.any() for leaf in optree.tree_leaves(other.opt_state[:2]))
    compare(other.opt_state[2], state.opt_state[1], 0.0, "Adam's")
    part = {"kept": ya.Param((3,)), "still": ya.frozen({"w": ya.Param((2,))})}
    with pytest.warns(UserWarning, match=r"begin anew: ScaleByAdamState of still\.w$"):
        ya.shard(ya.init(part, TX, mesh=mesh), TX, like={**part, "still": {"w": ya.Param((2,))}})


@on_ranks(2)
def test_a_leaf_of_another_shape_is_named(mesh: Any) -> None:
    state = ya.init({"embed": ya.Param((7, 6))}, mesh=mesh)
    with pytest.raises(ValueError, match=r"embed: the state has shape \(7, 6\).*, the tree \(10, 6\)"):
        ya.shard(state, like={"embed": ya.Param((10, 6))})
