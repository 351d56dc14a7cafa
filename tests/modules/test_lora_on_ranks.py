"""Adapters on ranks: exact beside the loop on merged weights, second stacks, unfreezing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.func as tf
import torch.nn.functional as F_
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import TOLERANCE, batch_of, compare, global_batch, relative
from tests.harness.pool import on_ranks
from tests.harness.problems import CLIPPED as TX
from tests.harness.problems import Batch, Head, Layer, Params, base_params, block, embed, masked_loss
from yafsdp_fn.params.tree import named_leaves
from yafsdp_fn.schedules import Program

F64 = ya.Precision(torch.float64)
RANK, ALPHA, LAYERS = 2, 3.0, 3

REMATS = {
    "none": ya.schedules.remat.none,
    "all": ya.schedules.remat.all,
    "first": ya.schedules.remat.first(1),
    "every": ya.schedules.remat.every(2),
    "offload": ya.schedules.remat.offload(),
}


def every_matrix(path: str, p: ya.Param) -> bool:
    """Those of layers, the embedding and the head."""
    return len(p.shape) == 2


def begun(tree: Any, dtype: torch.dtype = torch.float32) -> Any:
    """`tree` with adapters that are not zero."""
    made = ya.params.initializers.normal(0.5)

    def of(node: Any) -> Any:
        if not isinstance(node, ya.LowRank):
            return node
        a = dataclasses.replace(node.a, dtype=dtype)
        b = dataclasses.replace(node.b, dtype=dtype, init=made)
        return dataclasses.replace(node, a=a, b=b)

    return optree.tree_map(of, tree, is_leaf=lambda node: isinstance(node, ya.LowRank))


def adapted(dtype: torch.dtype | None = None) -> Params:
    return begun(ya.lora(base_params(LAYERS), RANK, every_matrix, alpha=ALPHA, dtype=dtype))


# ---- a model that uses weights in several ways


def head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(F_.linear(x * w.scale, w.out), targets)


def loss(params: Params, batch: Batch) -> ya.Mean:
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)  # one matrix through `ya.linear`, the other as a tensor
    return ya.apply(head, params.head, x, batch["targets"])


def by_hand(whole: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Value and gradients of all pairs by autograd of the plain model on W + alpha / rank * B A, formed in front."""
    pairs = {path: leaf.clone().requires_grad_() for path, leaf in whole.items() if path[-2:] in (".a", ".b")}

    def of(path: str) -> Tensor:
        stored = whole.get(f"{path}.int8")
        base = whole[path] if stored is None else stored * whole[f"{path}.row_scale"].unsqueeze(-1)
        return base + ALPHA / RANK * pairs[f"{path}.b"] @ pairs[f"{path}.a"] if f"{path}.a" in pairs else base

    names = ya.params.without_markers(ya.params.leaf_names(base_params(LAYERS)))
    total, weight = loss(optree.tree_map(of, names), batch)
    grads = torch.autograd.grad(total, list(pairs.values()))
    return (total / weight).detach(), {path: grad / weight for path, grad in zip(pairs, grads, strict=True)}


def wide(tree: Any) -> dict[str, Tensor]:
    """Path -> leaf in float64."""
    return {path: leaf.double() for path, leaf in named_leaves(ya.params.without_markers(tree))}


# ---- exact


def exact(mesh: Any, remats: tuple[str, ...], dtype: torch.dtype | None) -> None:
    whole = wide(ya.materialize(adapted(dtype)))
    value, grads = by_hand(whole, global_batch(mesh.size()))
    assert len(grads) == 8
    assert all(grad.norm() > 1e-4 for grad in grads.values())
    state = ya.init(adapted(dtype), TX, mesh=mesh, precision=F64)
    own = batch_of(mesh.get_rank())
    for remat in remats:
        both = ya.value_and_grad(loss, schedule=ya.schedules.zero3(remat=REMATS[remat]))
        for call in ("first", "second"):
            got, tree = both(state.params, own)
            found = wide(ya.unshard(tree))
            assert relative(got.double(), value.float().double()) < 1e-6
            for path, grad in grads.items():
                assert relative(found[path], grad) < TOLERANCE[torch.float64], (path, remat, call)
            assert not any(leaf.any() for path, leaf in found.items() if path not in grads), "frozen"
    if len(remats) > 2:
        value_of = ya.functional_loss(lambda parts, batch: loss(Params(*parts), batch))
        found = wide(ya.unshard(Params(*tf.grad(value_of)(state.params[:3], own))))
        assert all(relative(found[path], grad) < TOLERANCE[torch.float64] for path, grad in grads.items())


@on_ranks(1, 2)
def test_gradients_are_those_of_merged_weights(mesh: Any) -> None:
    exact(mesh, tuple(REMATS), None)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "dtype"), [(1, torch.int8), (2, torch.int8), (2, torch.bfloat16), (3, None), (4, None)]
)
def test_gradients_with_bases_of_other_dtypes_and_on_more_ranks(mesh: Any, dtype: torch.dtype | None) -> None:
    exact(mesh, ("none", "all"), dtype)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_training_moves_adapters_alone(mesh: Any, tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Three steps beside the plain loop, and a checkpoint on the way."""
    plain = ya.PlainState.create(adapted(dtype), TX)
    state = ya.init(adapted(dtype), TX, mesh=mesh)
    step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(update=True), microbatches=3)
    oracle = ya.train_step(loss, TX, microbatches=1)
    for number in range(3):
        state, got = step(state, batch_of(mesh.get_rank(), seed=number))
        plain, expected = oracle(plain, global_batch(mesh.size(), seed=number))
        assert relative(got["loss"], expected["loss"]) < 1e-5
        if number == 1:
            ya.checkpoint.save(tmp_path, state)
            state, _ = ya.checkpoint.load(tmp_path, ya.init(adapted(dtype), TX, mesh=mesh, seed=1))
    compare(state, plain.params, TOLERANCE[torch.float32], "trained")
    compare(ya.merge_lora(state), ya.merge_lora(plain.params), TOLERANCE[torch.float32], "merged")
    before = dict(named_leaves(ya.params.without_markers(ya.materialize(adapted(dtype)))))
    for path, leaf in named_leaves(ya.unshard(state)):
        assert torch.equal(leaf, before[path]) == (path[-2:] not in (".a", ".b")), path
    assert moved(step.program(state)) == ["embed", "head", *(f"layers[{i}]" for i in range(LAYERS))]


def moved(program: Program) -> list[str]:
    """Names of the units that are reduced or updated."""
    ops = [op for op in program.ops if isinstance(op, ya.schedules.Reduce | ya.schedules.Update)]
    return sorted({program.trace.units[unit].name for op in ops for unit in op.units})


# ---- by hand: a second stack


def pair_block(x: Tensor, w: tuple[Layer, dict[str, Tensor]]) -> tuple[Tensor, None]:
    base, pair = w
    up = ya.linear(x, base.up, base.bias) + ALPHA / RANK * ya.linear(ya.linear(x, pair["a"]), pair["b"])
    return x + base.gate * (torch.tanh(up) @ base.down.T), None


def stacks_loss(params: Any, batch: Batch) -> ya.Mean:
    x = ya.apply(embed, params["embed"], batch["tokens"])
    x, _ = ya.scan(pair_block, x, (params["base"], params["pairs"]))
    return ya.apply(head, params["head"], x, batch["targets"])


@on_ranks(1, 2)
def test_a_second_stack_written_by_hand(mesh: Any) -> None:
    """Two stacks that are scanned together, and one whose leaf is a `LowRank` made by hand: the same numbers."""
    base = ya.materialize(base_params(LAYERS))
    a = torch.randn(LAYERS, RANK, 7)
    b = torch.randn(LAYERS, 5, RANK)
    around = {"embed": ya.frozen(base.embed), "head": ya.frozen(base.head)}
    two = {**around, "base": ya.frozen(ya.Stacked(base.layers)), "pairs": ya.Stacked({"a": a, "b": b})}
    up = ya.LowRank(ya.frozen(base.layers.up), None, a, b, ALPHA / RANK)
    rest = [ya.frozen(leaf) for leaf in base.layers[1:]]
    one = Params(**around, layers=ya.Stacked(Layer(up, *rest)))
    step = ya.train_step(stacks_loss, TX)
    first, second = (ya.shard(tree, TX, mesh=mesh, precision=F64) for tree in (two, one))
    other = ya.train_step(loss, TX)
    for number in range(3):
        own = batch_of(mesh.get_rank(), seed=number)
        (first, got), (second, expected) = step(first, own), other(second, own)
        assert relative(got["loss"].double(), expected["loss"].double()) < 1e-6
    pairs = ya.unshard(first)["pairs"]
    inside = ya.unshard(second).layers.up
    compare((pairs["a"], pairs["b"]), (inside.a, inside.b), 1e-9, "by hand")
    assert not torch.equal(pairs["b"], b)
    assert moved(step.program(first)) == [f"pairs[{i}]" for i in range(LAYERS)]


# ---- unfreezing between steps


def leaves(tree: Any) -> dict[str, Tensor]:
    return dict(named_leaves(ya.unshard(tree)))


@on_ranks(2)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_is_frozen_changes_between_steps(mesh: Any, compute: torch.dtype) -> None:
    """Adapters; then embedding and head as well; then adapters again."""
    precision = ya.Precision(compute=compute)
    plain = base_params(LAYERS)
    few = ya.lora(plain, RANK)
    more = few._replace(embed=plain.embed, head=plain.head)
    steps = [ya.train_step(loss, TX) for _ in range(3)]
    own = batch_of(mesh.get_rank())

    def two(step: Any, state: Any) -> Any:
        for _ in range(2):
            state, _ = step(state, own)
        return state

    state = two(steps[0], ya.init(few, TX, mesh=mesh, precision=precision, seed=3))
    before = leaves(state.params)
    moments = leaves(state.opt_state)
    state = ya.shard(state, TX, like=more)
    assert (state.step, state.seed, state.precision) == (2, 3, precision)
    assert {group.name for group in state.memory.groups if group.trainable} == {"embed", "layers", "head"}
    after = leaves(state.params)
    new = leaves(state.opt_state)
    for path, leaf in after.items():
        assert torch.equal(leaf, before[path].to(leaf.dtype)), path
    assert before["embed"].dtype == compute
    assert after["embed"].dtype == torch.float32
    fresh = new.keys() - moments.keys()
    assert all(torch.equal(new[path], leaf) for path, leaf in moments.items())
    assert not any(new[p].any() for p in fresh)
    assert {path.rpartition("mu.")[2] for path in fresh if "mu." in path} == {"embed", "head.scale", "head.out"}
    state = two(steps[1], state)
    trained = leaves(state.params)
    frozen = {path for path in trained if path.startswith("layers") and path[-2:] not in (".a", ".b")}
    assert {path for path, leaf in trained.items() if torch.equal(leaf, after[path])} == frozen | {"layers.size"}
    state = two(steps[2], ya.shard(state, TX, like=few))
    last = leaves(state.params)
    assert torch.equal(last["embed"], trained["embed"].to(compute))
    assert state.step == 6
    assert not torch.equal(last["layers.up.a"], trained["layers.up.a"])
