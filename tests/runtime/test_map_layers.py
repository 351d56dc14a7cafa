"""map_whole_layers: a function of whole layers, on sharded stacks what it is on plain ones."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import one_rank, param, states

TX = ya.optim.adamw(1e-2)


def stacks() -> tuple[Any, Any]:
    return states({"s": ya.Stacked({"w": param(4, 3, 2), "b": param(4, 5)}), "t": ya.Stacked([param(4, 2)])})


def test_a_layer_of_moments_for_a_layer_of_moments_is_a_stack_again() -> None:
    tree = {"s": ya.Stacked({"w": param(2, 3, 3), "base": ya.frozen(param(2, 3))})}
    state = ya.init(tree, TX, mesh=one_rank())
    mu = optree.tree_map(lambda x: x + 1, state.opt_state[0].mu)["s"]
    moved = ya.map_whole_layers(lambda m: {"w": m["w"] * 2, "base": None}, mu)
    assert isinstance(moved, ya.Sharded)
    assert ya.unshard(moved)["w"].eq(2).all()


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
