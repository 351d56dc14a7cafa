"""map_whole_layers: a function of whole layers, on sharded stacks what it is on plain ones."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import assert_equal, model, one_rank, param, states

TX = ya.optim.adamw(1e-2)


def stacks() -> tuple[Any, Any]:
    return states({"s": ya.Stacked({"w": param(4, 3, 2), "b": param(4, 5)}), "t": ya.Stacked([param(4, 2)])})


def test_several_stacks_and_plain_tensors_together() -> None:
    def f(layer: Any, other: Any, scale: torch.Tensor) -> Any:
        return {"w": layer["w"] @ other[0] * scale, "b": layer["b"]}

    sharded, plain = stacks()
    scale = torch.arange(4.0)
    outs = [ya.map_whole_layers(f, p["s"], p["t"], scale) for p in (sharded, plain)]
    assert not isinstance(outs[0], ya.Sharded)  # w has another shape than the layer's
    assert_equal(*outs)


def test_moments_of_a_stack_with_frozen_leaves() -> None:
    tree = {"s": ya.Stacked({"w": param(2, 3, 3), "base": ya.frozen(param(2, 3))})}
    state = ya.init(tree, TX, mesh=one_rank())
    mu = optree.tree_map(lambda x: x + 1, state.opt_state[0].mu)["s"]
    out = ya.map_whole_layers(lambda p, m: p["w"].sum() + m["w"].sum(), state.params["s"], mu)
    whole = ya.unshard(state)["s"]
    assert torch.allclose(out, whole["w"].sum((1, 2)) + 9)
    assert ya.unshard(mu)["base"] is None and ya.unshard(mu)["w"].eq(1).all()


def test_a_layer_of_moments_for_a_layer_of_moments_is_a_stack_again() -> None:
    tree = {"s": ya.Stacked({"w": param(2, 3, 3), "base": ya.frozen(param(2, 3))})}
    state = ya.init(tree, TX, mesh=one_rank())
    mu = optree.tree_map(lambda x: x + 1, state.opt_state[0].mu)["s"]
    moved = ya.map_whole_layers(lambda m: {"w": m["w"] * 2, "base": None}, mu)
    assert isinstance(moved, ya.Sharded) and ya.unshard(moved)["w"].eq(2).all()


def test_layers_are_the_masters_not_the_working_copy() -> None:
    state = ya.init(model(), TX, mesh=one_rank(), precision=ya.Precision(compute=torch.bfloat16))
    dtypes = set()

    def f(layer: Any) -> None:
        dtypes.update(leaf.dtype for leaf in optree.tree_leaves(layer))
        assert not torch.is_grad_enabled()

    ya.map_whole_layers(f, state.params.layers)
    assert dtypes == {torch.float32}


def test_errors() -> None:
    sharded, plain = stacks()
    single, _ = states({"u": {"w": param(3)}, "s": ya.Stacked({"w": param(3, 2)})})
    nothing = lambda *layers: None  # noqa: E731
    with pytest.raises(TypeError, match=r"expected one stack, got a tree with Sharded\('s'.*; stacks in it: \['s'"):
        ya.map_whole_layers(nothing, sharded)
    with pytest.raises(TypeError, match=r"expected one stack, got a tree with Sharded\('s'"):
        ya.map_whole_layers(nothing, sharded["s"], sharded)
    with pytest.raises(TypeError, match=r"layers\.w: expected a tensor with an axis of layers, got torch.float32 \(2,"):
        ya.map_whole_layers(nothing, {"layers": {"w": ya.Param((2, 3))}})
    with pytest.raises(TypeError, match=r"map_whole_layers\(f, stack\): the function comes first, got Sharded"):
        ya.map_whole_layers(sharded["s"], nothing)
    with pytest.raises(TypeError, match=r"map_whole_layers over 'u', which is not Stacked: use ya.apply"):
        ya.map_whole_layers(nothing, single["u"])
    with pytest.raises(ValueError, match="'s' is not of the same state and length as 's'"):
        ya.map_whole_layers(nothing, sharded["s"], single["s"])
    with pytest.raises(TypeError, match="the first stack is plain, another is sharded"):
        ya.map_whole_layers(nothing, plain["s"], sharded["s"])
    with pytest.raises(ValueError, match="stacks of different length: 4, 3"):
        ya.map_whole_layers(nothing, plain["s"], torch.ones(3))
    layers = iter([True, False, True, False])
    with pytest.raises(ValueError, match="a tree like the layer for some layers and another for others"):
        ya.map_whole_layers(lambda layer: layer if next(layers) else layer["w"], sharded["s"])
