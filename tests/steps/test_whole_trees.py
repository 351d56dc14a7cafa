"""Whole trees: init, unshard, normal_like, vdot, global_norm, map_whole_layers are the same at every world size."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, own_and_all, plain, relative, whole
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, TX, Params, base_loss, base_params

NAMES = ("base", "tied", "stacks", "frozen", "units", "pinned")
WORLDS = on_ranks(1, 2, 3, 4)
BF16 = ya.Precision(compute=torch.bfloat16)


# ---- the same bits at every world size


def initial(mesh: Any, name: str) -> None:
    abstract = PROBLEMS[name].params(3)
    expected = ya.materialize(abstract, seed=5)
    compare(ya.init(abstract, TX, mesh=mesh, seed=5), expected, 0.0, f"{name}: init")
    if name != "frozen":  # what is frozen is stored as it is gathered
        state = ya.init(abstract, TX, mesh=mesh, seed=5, precision=BF16)
        compare(state, expected, 0.0, f"{name}: masters beside a bf16 working copy")
    compare(ya.shard(ya.PlainState.create(abstract, TX, seed=5).params, TX, mesh=mesh), expected, 0.0, name)
    lazy = optree.tree_map(lambda x: ya.Lazy(x.shape, x.dtype, lambda at, x=x: x if at is None else x[at]), expected)
    marked = optree.tree_unflatten(optree.tree_structure(abstract), optree.tree_leaves(lazy))
    compare(ya.shard(marked, TX, mesh=mesh), expected, 0.0, f"{name}: lazy")


@pytest.mark.sampled
@WORLDS
@pytest.mark.parametrize("name", NAMES)
def test_init_and_shard_have_the_same_bits_at_every_world_size(mesh: Any, name: str) -> None:
    initial(mesh, name)


def is_params(node: Any) -> bool:
    return isinstance(node, Params)


@WORLDS
def test_padding_stays_zero(mesh: Any) -> None:
    """After init, in gradients, moments, steps, random trees and mapped layers: sums over shards are over leaves."""
    state = ya.init(base_params(3), TX, mesh=mesh)
    step = ya.train_step(base_loss, TX)
    for _ in range(3):
        state, _ = step(state, batch_of(mesh.get_rank()))
    _, grads = ya.value_and_grad(base_loss)(state.params, batch_of(mesh.get_rank()))
    moments = [tree for tree in optree.tree_leaves(state.opt_state, is_leaf=is_params) if is_params(tree)]
    assert len(moments) == 2
    moved = ya.map_whole_layers(lambda layer: optree.tree_map(torch.exp, layer), state.params.layers)
    for tree in (state.params, grads, ya.normal_like(0, state.params), moved, *moments):
        squares = torch.stack([leaf.double().square().sum() for leaf in optree.tree_leaves(tree)]).sum()
        if mesh.size() > 1:
            torch.distributed.all_reduce(squares, group=mesh.get_group())
        whole = torch.stack([leaf.double().square().sum() for leaf in optree.tree_leaves(ya.unshard(tree))]).sum()
        assert relative(squares, whole) < 1e-12


@on_ranks(2)
def test_strided_shards_are_gathered(mesh: Any) -> None:
    params = ya.init(base_params(3), TX, mesh=mesh).params
    strided = optree.tree_map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0], params)
    compare(ya.unshard(strided), ya.unshard(params), 0.0, "strided")


GATES = ("layers.gate", "layers.main.gate", "layers.side.gate", "more.gate", "more.main.gate")
"""Some of which are pinned."""


def chosen(params: Any, values: Any) -> Any:
    """Of `values` those of matrices and gates."""
    mask = ya.params.leaf_mask(lambda path, p: len(p.shape) > 1 or path in GATES, params)
    return optree.tree_map(lambda here, x: torch.where(here, x, 0.0), mask, values)


def numbers(mesh: Any, name: str) -> None:
    abstract = PROBLEMS[name].params(3)
    ranks = mesh.size()
    state = ya.init(abstract, TX, mesh=mesh)
    marked = plain(abstract)
    a, b = (ya.normal_like(seed, state.params) for seed in (1, 2))
    plain_a, plain_b = (whole(ya.normal_like(seed, marked)) for seed in (1, 2))
    compare(a, plain_a, 0.0, f"{name}: normal_like")
    assert all(relative(x, y) > 0.5 for x, y in zip(*map(optree.tree_leaves, (plain_a, plain_b)), strict=True))
    compare(chosen(state.params, a), chosen(marked, ya.normal_like(1, marked)), 0.0, f"{name}: leaf_mask")
    tolerance = 1e-6
    compare(ya.global_norm(a), ya.global_norm(plain_a), tolerance, f"{name}: global_norm")
    norm = torch.cat([leaf.flatten() for leaf in optree.tree_leaves(plain_a)]).double().norm()
    compare(ya.global_norm(a).double(), norm, tolerance, f"{name}: global_norm by hand")
    compare(ya.vdot(a, a), norm.square().float(), tolerance, f"{name}: vdot of one")
    pairs = zip(optree.tree_leaves(plain_a), optree.tree_leaves(plain_b), strict=True)
    dot = sum((x.double() * y.double()).sum() for x, y in pairs)
    for got in (ya.vdot(a, b), ya.vdot(plain_a, plain_b)):
        assert abs(float(got - dot)) <= tolerance * float(norm) ** 2
    everywhere = [torch.zeros(()) for _ in range(ranks)]
    if ranks > 1:
        torch.distributed.all_gather(everywhere, ya.vdot(a, b))
        assert len({float(value) for value in everywhere}) == 1, "ranks differ"
    # part of a tree, and a tree with plain leaves beside sharded ones, which are counted once
    compare(ya.global_norm(a.head), ya.global_norm(plain_a.head), tolerance, f"{name}: norm of a part")
    mixed = {"sharded": a.head, "plain": torch.tensor([3.0, 4.0])}
    expected = (ya.global_norm(plain_a.head).square() + 25).sqrt()
    compare(ya.global_norm(mixed), expected, tolerance, f"{name}: norm of a mixed tree")


@pytest.mark.sampled
@WORLDS
@pytest.mark.parametrize("name", NAMES)
def test_numbers_over_trees(mesh: Any, name: str) -> None:
    numbers(mesh, name)


# ---- map_whole_layers


@WORLDS
def test_map_layers(mesh: Any) -> None:
    """Of masters, in the dtype of the parameters; what comes out goes on as a stack of the state."""
    for precision in (ya.Precision(), BF16):
        state = ya.init(base_params(3), TX, mesh=mesh, precision=precision)
        marked = whole(plain(base_params(3)))
        stack = state.params.layers
        rows = marked.layers

        kept = ya.map_whole_layers(lambda layer: layer, stack)
        for got, expected in zip(kept.leaves, stack.leaves, strict=True):
            assert torch.equal(got, expected)
            assert got.data_ptr() != expected.data_ptr()
        statistics = lambda layer: {"norm": layer.up.norm(), "shape": layer.up.shape[0], "no": None}  # noqa: E731
        compare(ya.map_whole_layers(statistics, stack), ya.map_whole_layers(statistics, rows), 0.0, "statistics")

        wide = lambda layer: optree.tree_map(lambda x: 2 * x.double(), layer)  # noqa: E731
        doubled, expected = (ya.map_whole_layers(wide, of) for of in (stack, rows))
        compare(doubled, expected, 0.0, "an elementwise function, in another dtype")
        if precision == ya.Precision():
            mine, everything = own_and_all(mesh)
            value = ya.eval_step(base_loss)(state.params._replace(layers=doubled), mine)["loss"]
            narrow = marked._replace(layers=optree.tree_map(Tensor.float, expected))
            plain_value = ya.eval_step(base_loss)(narrow, everything)["loss"]
            compare(value, plain_value, 1e-6, "the moved stack")


def changed(layer: Any, gradient: Any, at: Tensor) -> Any:
    """Rows change places; every layer and leaf changes in its own way."""
    assert not torch.is_grad_enabled()
    return optree.tree_map(lambda w, g: w.flip(0) - at * g if w.ndim else w - at, layer, gradient)


def spoiling(*layers: Any) -> Any:
    """The same, and what comes in is overwritten, which is neither the parameters nor another layer's."""
    out = changed(*layers)
    for leaf in optree.tree_leaves(layers[:2]):
        leaf.zero_()
    return out


def several_units(mesh: Any) -> None:
    """Layers of one unit, of two, of a frozen and a trained one, and of pinned leaves, beside their gradients."""
    for name, of in (
        ("base", "layers"),
        ("units", "layers"),
        ("frozen", "more"),
        ("frozen", "layers"),
        ("pinned", "layers"),
        ("pinned", "more"),
    ):
        problem = PROBLEMS[name]
        state = ya.init(problem.params(3), TX, mesh=mesh)
        marked = whole(plain(problem.params(3)))
        grads = ya.grad(problem.loss)(state.params, batch_of(mesh.get_rank()))
        stack, gradient, rows = (getattr(tree, of) for tree in (state.params, grads, marked))
        at = torch.arange(float(stack.entry.length))
        found = ya.map_whole_layers(spoiling, stack, gradient, at)
        compare(found, ya.map_whole_layers(changed, rows, ya.unshard(gradient), at), 0.0, f"{name}.{of}: changed")
        compare(ya.global_norm(found), ya.global_norm(ya.unshard(found)), 1e-6, f"{name}.{of}: gaps are zero")
        compare(stack, rows, 0.0, f"{name}.{of}: parameters are left alone")
        compare(ya.map_whole_layers(sum_of, stack), ya.map_whole_layers(sum_of, rows), 1e-6, f"{name}.{of}: sums")


def sum_of(layer: Any) -> Tensor:
    return torch.stack([leaf.double().sum() for leaf in optree.tree_leaves(layer)]).sum()


@WORLDS
def test_map_layers_over_several_units(mesh: Any) -> None:
    several_units(mesh)
