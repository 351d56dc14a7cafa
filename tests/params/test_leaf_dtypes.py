"""Leaves of a dtype of their own: their units, states, checkpoints and errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from tests.harness.small import assert_equal, one_rank
from tests.steps.test_leaf_dtypes import BF16, F32, F64, LAYERS, TX, loss, tree
from yafsdp_fn.checkpoint.io import load, save
from yafsdp_fn.params.tree_layout import tree_layout

HALF = ya.Precision(compute=BF16)


def names(abstract: Any) -> list[str]:
    return [group.name for group in tree_layout(abstract)[0].groups]


def bare(abstract: Any) -> Any:
    """The same tree, and no leaf with a dtype of its own."""
    return optree.tree_map(lambda leaf: dataclasses.replace(leaf, compute=None, reduce=None), abstract)


def test_units_of_a_stack_by_dtype() -> None:
    assert names(tree()) == ["embed", "head", "head.compute(float32)", "layers.compute(float32)", "layers"]
    assert names(tree(reduce=BF16))[3] == "layers.compute(float32).reduce(bfloat16)"
    assert names(bare(tree())) == ["embed", "head", "layers"]
    whole = {"layers": ya.Stacked({"w": ya.Param((2, 3), compute=F32)})}
    assert names(whole) == ["layers"]  # no other leaves to tell it from
    found = {group.name: (group.dtype, group.reduce, group.layout.names) for group in tree_layout(tree())[0].groups}
    assert found["layers.compute(float32)"] == (F32, None, ("layers.decay", "layers.gain", "layers.router"))


def test_markers_and_dtypes() -> None:
    leaf = ya.Param((2, 4), compute=F32)
    main = ya.Param((2, 4))
    layers = {"p": ya.Pinned(leaf), "u": ya.Unit({"a": leaf, "b": main}), "f": ya.frozen(leaf), "m": main}
    layers["t"] = ya.Param((2, 4), split={"tensor": -1}, compute=F32, reduce=BF16)
    assert names({"s": ya.Stacked(layers)}) == [
        "s.compute(float32).pinned",
        "s.frozen(float32)",
        "s",
        "s.compute(float32).reduce(bfloat16).split(tensor)",
        "s.u.compute(float32)",
        "s.u",
    ]


def test_a_frozen_leaf_is_stored_in_its_own_dtype_whatever_is_around_it() -> None:
    leaves = {"own": ya.Param((4,), compute=F64), "other": ya.Param((4,))}
    for dtype, other in ((None, BF16), (F32, F32)):
        state = ya.init({"w": ya.frozen(leaves, dtype)}, mesh=one_rank(), precision=HALF)
        stored = ya.unshard(state)["w"]
        assert (stored["own"].dtype, stored["other"].dtype) == (F64, other)
        plain = ya.materialize({"w": ya.frozen(leaves, dtype)})["w"]
        assert (plain["own"].dtype, plain["other"].dtype) == (F64, F32)


def test_masters_stay_and_are_copied_where_they_are_gathered_otherwise() -> None:
    state = ya.init(tree(), TX, mesh=one_rank(), precision=HALF)
    assert {leaf.dtype for leaf in optree.tree_leaves(state.params)} == {F32}
    memory = state.memory
    aliases = [w is m for w, m in zip(memory.working.present, memory.master.present, strict=True)]
    assert aliases == [False, False, True, True, False]  # no copy of what is gathered as it is stored
    assert_equal(ya.unshard(state), ya.materialize(tree(), seed=0))


def test_named_weights_and_whole_layers_do_not_know_it() -> None:
    states = [ya.init(abstract, mesh=one_rank(), precision=HALF) for abstract in (tree(), bare(tree()))]
    named = [{name: weight.clone() for name, weight in ya.named_weights(state.params)} for state in states]
    assert named[0].keys() == named[1].keys()
    assert all(torch.equal(named[0][name], named[1][name]) for name in named[0])
    for state in states:
        found = ya.map_whole_layers(lambda w: 2 * w["gain"], state.params["layers"])
        assert torch.equal(found, 2 * ya.unshard(state)["layers"]["gain"])


def trained(mesh: Any, abstract: Any, steps: int = 2) -> Any:
    state = ya.init(abstract, TX, mesh=mesh, precision=HALF)
    step = ya.train_step(loss, TX)
    for number in range(steps):
        state, _ = step(state, batch_of(mesh.get_rank(), seed=number))
    return state


@on_ranks(1, 2)
def test_checkpoints_and_states_carry_over(mesh: Any, tmp_path: Path) -> None:
    """Checkpoints and states, with own dtypes and without, load each other's values."""
    state = trained(mesh, tree(reduce=F32))
    save(tmp_path / "own", state)
    other, *_ = load(tmp_path / "own", ya.init(bare(tree()), TX, mesh=mesh, seed=1, precision=HALF))
    assert_equal(other.params, state.params)
    save(tmp_path / "bare", other)
    again, *_ = load(tmp_path / "bare", ya.init(tree(reduce=F32), TX, mesh=mesh, seed=2, precision=HALF))
    assert again.step == state.step == 2
    regrouped = ya.shard(other, TX, like=tree(reduce=F32))
    for found in (again, regrouped):
        assert_equal(found.params, state.params)
        for a, b in zip(optree.tree_leaves(found.opt_state), optree.tree_leaves(state.opt_state), strict=True):
            assert torch.equal(a, b)
    step = ya.train_step(loss, TX)
    results = [step(found, batch_of(mesh.get_rank(), seed=5))[0] for found in (state, again, regrouped)]
    assert_equal(results[0].params, results[1].params)
    assert_equal(results[0].params, results[2].params)
    assert ya.checksum(results[0]) == ya.checksum(results[1])


def test_torchs_checkpoints_keep_it(tmp_path: Path) -> None:
    def name(path: str, layer: int | None) -> str:
        return path if layer is None else f"{path}.{layer}"

    state = ya.init(tree(reduce=BF16), TX, mesh=one_rank(), precision=HALF)
    ya.checkpoint.save_named(tmp_path / "theirs", state.params, name)
    again = ya.checkpoint.load_named(tmp_path / "theirs", tree(reduce=BF16), name)
    assert names(again) == names(tree(reduce=BF16))
    assert_equal(ya.shard(again, mesh=one_rank()).params, state.params)


@on_ranks(2)
def test_ranks_with_other_dtypes_are_told(mesh: Any) -> None:
    with pytest.raises(ya.errors.RanksDisagree, match=r"disagree on the parameters(?s:.*)gathered in torch.bfloat16"):
        ya.init(tree(compute=F32 if mesh.get_rank() else BF16), mesh=mesh)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ya.Param((2,), compute=torch.float16), "Param.compute: float16 overflows"),
        (lambda: ya.Param((2,), reduce=torch.int8), "Param.reduce: expected a 16, 32 or 64-bit floating dtype, got t"),
        (
            lambda: ya.Param((2,), compute="float32"),
            "Param.compute: expected a 16, 32 or 64-bit floating dtype, got 'f",
        ),
        (lambda: ya.Lazy((2,), F32, lambda _: torch.ones(2), reduce=torch.float16), "Lazy.reduce: float16 overflows"),
        (
            lambda: ya.PlainState.create({"a": {"w": ya.Param((2,), compute=BF16)}}, TX),
            "PlainState: a.w is torch.float32 and has compute=torch.bfloat16, but blocks see plain tensors as they are",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_plain_state_takes_what_means_the_same() -> None:
    oracle = ya.PlainState.create(tree(), TX)
    state = ya.init(tree(), TX, mesh=one_rank())
    assert_equal(oracle.params["layers"].tree["gain"], ya.unshard(state)["layers"]["gain"])
    assert len(oracle.params["layers"].tree["gain"]) == LAYERS
