"""Optimizers that need whole leaves train shards as they train plain trees: on any number of ranks, in programs and
after them; and each leaf is worked on once."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import on
from tests.harness.oracle import compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import batch, loss, model, param
from tests.optim.trees import trains_as_plain
from yafsdp_fn import optim
from yafsdp_fn.communication.gloo import GlooGroup
from yafsdp_fn.util.owners import Leaf, assign

STEPS = 3


def by_kind(path: str, param: ya.Param) -> str:
    """Three labels, of which two share the units of layers."""
    return "matrices" if len(param.shape) > 1 and "layers" in path else "gains" if "head" in path else "rest"


def sizes() -> Any:
    """A foreign pair over all leaves at once: updates over the largest norm that any leaf's sum has had."""

    def init(params: Any) -> Any:
        return torch.zeros((), dtype=torch.float64)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norms = torch.stack([leaf.norm() for leaf in optree.tree_leaves(updates)])
        largest = torch.maximum(state, norms.max())
        return optree.tree_map(lambda u, p: u / largest + 0.01 * p.mean(), updates, params), largest

    return init, update


def rows() -> Any:
    """A foreign pair over the rows of one leaf, with a state of two shapes, that reads the parameter."""

    def init(leaf: Tensor) -> Any:
        return {"rows": leaf.new_zeros(leaf.shape[:1]), "count": leaf.new_zeros(())}

    def update(updates: Tensor, state: Any, leaf: Tensor) -> Any:
        squares = updates.square().flatten(1).mean(1) if updates.ndim > 1 else updates.square()
        new = {"rows": state["rows"] + squares, "count": state["count"] + 1}
        scale = (new["rows"] / new["count"] + 1e-3).rsqrt() * (1 + leaf.norm())
        return updates * scale.reshape(-1, *[1] * (updates.ndim - 1)), new

    return init, update


def centralized() -> Any:
    """Gradients without their means over all axes but the first, of whole leaves."""

    def update(updates: Tensor, state: Any, leaf: Any = None) -> Any:
        means = updates.mean(tuple(range(1, updates.ndim)), keepdim=True) if updates.ndim > 1 else 0
        return updates - means, state

    return optim.assume_leafwise((lambda leaf: (), update))


def some(path: str, param: ya.Param) -> bool:
    return "up" in path or "embed" in path


MUON = optim.muon(0.02, dtype=None, others=optim.adamw(0.01))
TXS: dict[str, Any] = {
    "muon": optim.chain(optim.clip_by_global_norm(0.5), MUON),
    "muon, no clip": optim.muon(0.02, dtype=None, adjust="match_rms_adamw", nesterov=False, where=optim.layer_matrices),
    "soap": optim.contrib.soap(0.02),
    "two rounds": optim.chain(
        centralized(), optim.trace(0.9), optim.assume_leafwise(rows(), params=True), optim.scale(-0.01)
    ),
    "some leaves": optim.chain(optim.assume_leafwise(rows(), params=True, where=some), optim.sgd(0.01)),
    "partition": optim.partition(
        {
            "matrices": optim.chain(centralized(), optim.sgd(0.1)),
            "gains": optim.adam(0.01),
            "rest": optim.sgd(0.1, 0.9),
        },
        by_kind,
    ),
    "partition of a norm": optim.partition(
        {"layers": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1)), "rest": optim.sgd(0.1)},
        lambda path, param: "layers" if "layers" in path else "rest",
    ),
    "partition, scaled": optim.chain(
        optim.partition({"matrices": centralized(), "gains": optim.identity(), "rest": optim.scale(0.5)}, by_kind),
        optim.sgd(0.1),
    ),
    "masked": optim.chain(optim.masked(centralized(), some), optim.sgd(0.1)),
    "foreign": optim.chain(optim.trace(0.5), sizes(), optim.scale(-0.1)),
    "foreign, alone": sizes(),
    "foreign, masked": optim.chain(optim.masked(sizes(), some), optim.scale(-0.1)),
    "clipped later": optim.chain(centralized(), optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
}
IN_PROGRAMS = [name for name in TXS if optim.why_not_unitwise(TXS[name]) is None]


def pinned() -> Any:
    params = model()
    params.layers.tree["down"] = ya.Pinned(params.layers.tree["down"])
    params.layers.tree["bias"] = ya.Pinned(params.layers.tree["bias"])
    return params


PARAMS = {"layers": model, "pinned": pinned}


def trained(mesh: Any, name: str, params: str = "layers") -> None:
    how: Any = {"steps": STEPS, "tolerance": 1e-10, "of_state": 1e-10}
    trains_as_plain(mesh, TXS[name], create=PARAMS[params], inside=name in IN_PROGRAMS, by_hand=True, **how)


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", TXS)
def test_training_is_that_of_plain_trees(pools: Pools, name: str, world: int) -> None:
    pools[world].run(trained, name)


def test_training_with_pinned_leaves(pools: Pools) -> None:
    for name in ("muon", "two rounds", "partition", "foreign"):
        pools[2].run(trained, name, "pinned")


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        *(("replicate", ("foreign",)), ("nodes", ("soap",)), ("replicate-nodes", ("muon",))),
        *(nightly("replicate", ("muon", "soap")), nightly("nodes", ("two rounds",))),
    ],
)
def test_training_on_other_meshes(pools: Pools, mesh: str, names: tuple[str, ...]) -> None:
    for name in names:
        pools[4].run(on, mesh, trained, name)


# ---- what is refused


def pair(init: Any, update: Any = lambda updates, state, leaf=None: (updates, state)) -> Any:
    return optim.assume_leafwise((init, update))


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (pair(lambda leaf: leaf * 2), r"first state of .* for embed.weight depends on the leaf's values"),
        (
            pair(lambda leaf: torch.zeros((), dtype=torch.int32)),
            "of torch.int32; expected floating-point",
        ),
        (
            pair(lambda leaf: (leaf.new_zeros(2), torch.zeros(2, dtype=torch.float64))),
            r"of torch.float32, torch.float64",
        ),
    ],
    ids=["values", "integers", "two dtypes"],
)
def test_states_that_cannot_lie_in_flat_shards(tx: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ya.init(model(), tx)


def test_an_update_of_another_shape() -> None:
    tx = pair(lambda leaf: (), lambda updates, state, leaf=None: (updates.sum(), state))
    state = ya.init(model(), tx)
    with pytest.raises(TypeError, match=r"returned .* for the leaf, expected .* of shape \(11, 5\)"):
        state.apply_gradients(state.params, tx)


def test_labels_that_do_not_fit() -> None:
    parts = {"a": optim.sgd(0.1), "b": optim.sgd(0.2)}
    with pytest.raises(ValueError, match=r"partition: embed.weight has the label 'c'; there are transformations for"):
        ya.init(model(), optim.partition(parts, lambda path, param: "c"))
    with pytest.raises(TypeError, match=r"labels: expected a function of a leaf's path and its ya.Param, got dict"):
        optim.partition(parts, {"embed": "a", "head": "b"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in TXS if name not in IN_PROGRAMS])
def test_what_takes_no_step_unit_by_unit(name: str) -> None:
    step = ya.train_step(loss, TXS[name], schedule=ya.schedules.zero3(update=True))
    with pytest.raises(ValueError, match=r"the program updates unit by unit, but .*; pass update=False"):
        step.lower(ya.init(model(), TXS[name]), batch())


# ---- who owns what


def test_owners_hold_a_part_and_share_the_work() -> None:
    """Layers of seven matrices on two and more ranks: each leaf at a rank that has some of it, work within a leaf."""
    shapes = [(64, 64)] * 4 + [(172, 64)] * 2 + [(64, 172)]
    offsets = [0, *itertools.accumulate(rows * columns for rows, columns in shapes)]
    leaves = [Leaf(str(i), offset, shape, i) for i, (offset, shape) in enumerate(zip(offsets, shapes, strict=False))]
    for ranks in (1, 2, 3, 5, 8, 16):
        n = -(-offsets[-1] // ranks)
        owners = assign([(unit, n, leaves, [range(ranks)]) for unit in range(12)], ranks)
        load = [0] * ranks
        for of_unit in owners.values():
            for leaf, owner in zip(leaves, of_unit, strict=True):
                assert leaf.in_shard(owner, n)
                load[owner] += leaf.work
        assert max(load) <= 1.1 * sum(load) / ranks + max(leaf.work for leaf in leaves)
    half = offsets[-1] // 2
    (of_unit,) = assign([(0, half, leaves, [range(2)])], 2).values()
    travels = [leaf.numel - len(leaf.in_shard(owner, half)) for leaf, owner in zip(leaves, of_unit, strict=True)]
    assert sum(moved > 0 for moved in travels) <= 1  # on two ranks one matrix of a layer travels at most


def exchanged(step: Any, state: Any, batch: Any) -> tuple[int, int]:
    """Bytes that this rank sends in the exchanges of a step, and what the program says that ranks do on average."""
    program = step.lower(state, batch)
    comms = state.memory.comms
    found: list[int] = []
    real = GlooGroup.exchange

    def counted(group: Any, received: Any, parts: Any) -> None:
        if group is comms.reduce_group:
            found.append(sum(part.nbytes for part in parts))
        real(group, received, parts)

    with mock.patch.object(GlooGroup, "exchange", counted):
        step(state, batch)
        comms.drain()
    return sum(found), program.wire_bytes()["exchange"]


def sent(mesh: Any) -> tuple[int, int]:
    step = ya.train_step(loss, MUON, schedule=ya.schedules.zero3(update=True))
    return exchanged(step, ya.init(model(), MUON, mesh=mesh), batch())


@pytest.mark.parametrize("world", [3, nightly(4)])
def test_what_travels_is_what_the_program_says(pools: Pools, world: int) -> None:
    real, said = zip(*pools[world].run(sent), strict=True)
    assert len(set(said)) == 1 and abs(sum(real) / world - said[0]) <= 2 * 3  # rounded down, of three units, twice
    assert 0 < said[0] < 2 * 4 * 3 * 35  # there and back, in fp32, less than one matrix of each layer


@on_ranks(1, 2)
def test_soap_says_how_to_leave_out_what_is_no_matrix(mesh: Any) -> None:
    """What soap says of a leaf [E, m, n] of a layer helps."""
    tree = {"layers": ya.Stacked({"experts": param(3, 2, 5, 7), "w": param(3, 5, 7)}), "head": {"w": param(5, 7)}}
    with pytest.raises(
        ValueError, match=r"shape \(2, 5, 7\) is no matrix \[m, n\]; leave it to `others` of `soap`"
    ) as error:
        ya.init(tree, optim.contrib.soap(0.02), mesh=mesh)
    (said,) = re.findall(r"where=(lambda .*?), or to", str(error.value))
    tx = optim.contrib.soap(0.02, where=eval(said))
    precision = ya.Precision(torch.float64)
    state = ya.init(tree, tx, mesh=mesh, precision=precision)
    expected = ya.PlainState.create(tree, tx)
    expected = ya.PlainState.create(optree.tree_map(torch.Tensor.double, expected.params), tx)
    for number in range(3):
        expected = expected.apply_gradients(ya.normal_like(number, expected.params), tx)
        state = state.apply_gradients(ya.normal_like(number, state.params), tx)
    compare(ya.unshard(state), ya.params.without_markers(expected.params), 1e-9, "parameters")
