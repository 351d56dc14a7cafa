"""Whole trees: init, unshard, normal_like, vdot, global_norm, map_whole_layers are the same at every world size."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, global_batch, plain, relative, whole
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, TX, Layer, Params, base_loss, base_params

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
    abstract, ranks = PROBLEMS[name].params(3), mesh.size()
    state, marked = ya.init(abstract, TX, mesh=mesh), plain(abstract)
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


def newton_schulz(layer: Layer, gradient: Layer) -> Layer:
    """An update that needs whole matrices: rows and columns meet."""

    def update(w: Tensor, g: Tensor) -> Tensor:
        if g.ndim < 2:
            return w - 0.1 * g
        x = g / (g.norm() + 1e-6)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return w - 0.1 * x

    return optree.tree_map(update, layer, gradient)


@WORLDS
def test_map_layers(mesh: Any) -> None:
    ranks, rank = mesh.size(), mesh.get_rank()
    for precision in (ya.Precision(), BF16):
        state = ya.init(base_params(3), TX, mesh=mesh, precision=precision)
        marked = whole(plain(base_params(3)))
        stack, rows = state.params.layers, marked.layers

        kept = ya.map_whole_layers(lambda layer: layer, stack)
        for got, expected in zip(kept.leaves, stack.leaves, strict=True):
            assert torch.equal(got, expected) and got.data_ptr() != expected.data_ptr()
        for function, what in (
            (
                lambda layer: optree.tree_map(lambda x: 2 * x.double(), layer),
                "an elementwise function, in another dtype",
            ),
            (lambda layer: {"norm": layer.up.norm(), "shape": layer.up.shape[0], "no": None}, "statistics"),
        ):
            compare(ya.map_whole_layers(function, stack), ya.map_whole_layers(function, rows), 0.0, what)

        function = ya.value_and_grad(base_loss)
        _, grads = function(state.params, batch_of(rank))
        whole_grads = ya.unshard(grads).layers
        moved = ya.map_whole_layers(newton_schulz, stack, grads.layers)
        compare(moved, ya.map_whole_layers(newton_schulz, rows, whole_grads), 1e-6, "rest=gradients")
        shift = torch.arange(3.0)
        added = ya.map_whole_layers(lambda layer, s: optree.tree_map(lambda x: x + s, layer), stack, shift)
        expected = ya.map_whole_layers(lambda layer, s: optree.tree_map(lambda x: x + s, layer), rows, shift)
        compare(added, expected, 0.0, "rest=a plain tensor")

        # the result is a stack: the state goes on with it
        params = state.params._replace(layers=moved)
        value, _ = function(params, batch_of(rank))
        plain_params = marked._replace(layers=ya.unshard(moved))
        if precision == ya.Precision():
            compare(value, ya.value_and_grad(base_loss)(plain_params, global_batch(ranks))[0], 1e-6, "the moved stack")


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
    """Layers of two units, of a frozen and a trained one, and of pinned leaves, beside their gradients."""
    for name, of in (
        ("units", "layers"),
        ("frozen", "more"),
        ("frozen", "layers"),
        ("pinned", "layers"),
        ("pinned", "more"),
    ):
        problem = PROBLEMS[name]
        state, marked = ya.init(problem.params(3), TX, mesh=mesh), whole(plain(problem.params(3)))
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
