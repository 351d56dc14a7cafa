"""Where initial values come from: one layer of one leaf at a time, the same bits for any number of ranks."""

from __future__ import annotations

import random
import warnings
import weakref
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import assert_equal, one_rank, param
from yafsdp_fn.communication.ranks import absent_ranks
from yafsdp_fn.params.layout import FlatLayout, Group
from yafsdp_fn.params.sources import Source, fill_row, leaf_generator

CPU = torch.device("cpu")
LAYOUT = FlatLayout(("a", "b", "c"), ((5, 3), (), (9,)))


def test_values_depend_on_seed_path_and_layer_and_on_nothing_else() -> None:
    keys = [(0, "a", None), (1, "a", None), (0, "b", None), (0, "a", 1), (0, "a", 2), (0, "a.1", None), (10, "a", None)]
    drawn = [torch.rand(8, generator=leaf_generator(*key, CPU)) for key in keys]
    assert len({tuple(values.tolist()) for values in drawn}) == len(keys)
    again = [torch.rand(8, generator=leaf_generator(*key, CPU)) for key in reversed(keys)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, reversed(again), strict=True))


def test_a_leaf_keeps_its_values_when_others_come_and_go() -> None:
    small = ya.materialize({"b": {"w": param(3)}}, seed=1)
    large = ya.materialize({"a": {"w": param(3)}, "b": {"v": param(2), "w": param(3)}}, seed=1)
    assert torch.equal(small["b"]["w"], large["b"]["w"])
    assert not torch.equal(large["a"]["w"], large["b"]["w"])


def test_layers_of_a_stack_differ_and_the_depth_does_not_matter() -> None:
    two = ya.materialize({"s": ya.Stacked({"w": param(2, 5)})})["s"]["w"]
    four = ya.materialize({"s": ya.Stacked({"w": param(4, 5)})})["s"]["w"]
    assert torch.equal(two, four[:2])
    assert len({tuple(row.tolist()) for row in four}) == 4


def test_on_meta_there_are_shapes_and_dtypes_alone() -> None:
    layers = ya.Stacked({"w": param(2, 5), "base": ya.frozen(param(2, 3), torch.bfloat16)})
    lazy = ya.Lazy((4,), torch.float64, lambda layer: torch.ones(1 // 0))
    here = ya.materialize({"s": layers})
    meta = ya.materialize({"s": layers, "z": lazy}, device="meta")
    assert meta["s"]["w"].is_meta
    assert meta["z"].is_meta
    assert meta["z"].dtype == torch.float64
    assert here["s"]["base"].dtype == torch.bfloat16
    assert here["s"]["w"].dtype == torch.float32
    for name, leaf in here["s"].items():
        assert (meta["s"][name].shape, meta["s"][name].dtype) == (leaf.shape, leaf.dtype)


# ---- memory


class Watching:
    """An initializer that knows how many of the tensors it made are alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Tensor]] = []
        self.most = self.calls = 0

    def __call__(self, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.ones(shape, dtype=dtype)
        self._made.append(weakref.ref(made))
        self.calls += 1
        self.most = max(self.most, sum(x.numel() for ref in self._made if (x := ref()) is not None))
        return made


def test_init_holds_never_more_than_one_layer() -> None:
    watching = Watching()
    tree = {
        "embed": {"w": ya.Param((10, 4), init=watching)},
        "layers": ya.Stacked({name: ya.Param((6, 10, 3), init=watching) for name in "abcd"}),
    }
    ya.init(tree, ya.optim.sgd(0.1), mesh=one_rank())
    assert watching.calls == 2 + (6 + 1) * 4  # the first layer is drawn again
    assert 40 <= watching.most <= 4 * 30  # a layer has four leaves of 30


def test_lazy_leaves_are_loaded_layer_by_layer() -> None:
    calls: list[tuple[str, int | None]] = []
    stack = torch.rand(3, 4, 5)
    single = torch.rand(6)

    def load(name: str, tensor: Tensor) -> Source:
        def give(layer: int | None) -> Tensor:
            calls.append((name, layer))
            return tensor if layer is None else tensor[layer]

        return give

    tree = {
        "a": ya.Stacked({"w": ya.Lazy((3, 4, 5), torch.float32, load("stack", stack))}),
        "b": ya.Lazy([6], torch.float32, load("single", single)),
    }
    state = ya.shard(tree, ya.optim.sgd(0.1), mesh=one_rank())
    assert calls == [("stack", 0), ("stack", 1), ("stack", 2), ("single", None)]
    assert_equal(state, {"a": {"w": stack}, "b": single})
    calls.clear()
    assert_equal(ya.materialize(tree), {"a": {"w": stack}, "b": single})
    assert [layer for _, layer in calls] == [0, 1, 2, None]


def test_a_rank_loads_only_leaves_that_reach_into_its_slice() -> None:
    loaded = []

    def give(number: int) -> Tensor:
        loaded.append(LAYOUT.names[number])
        return torch.ones(LAYOUT.shapes[number])

    group = Group("", LAYOUT, (0,), (0, 1, 2), True, None)
    fill_row(torch.empty(8), group, absent_ranks((("shard", 2),)), give)
    assert loaded == ["a"]


def test_values_are_cast_to_what_the_state_stores() -> None:
    tree = {"w": ya.Param((3,), torch.float64), "v": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}
    state = ya.shard(tree, ya.optim.sgd(0.1), mesh=one_rank(), precision=ya.Precision())
    assert [(leaf.dtype, leaf.requires_grad) for leaf in optree.tree_leaves(state.params)] == [
        (torch.float32, False)
    ] * 2


# ---- errors


def sharding(tree: Any) -> None:
    ya.shard(tree, ya.optim.sgd(0.1), mesh=one_rank())


@pytest.mark.parametrize("run", [sharding, ya.materialize])
def test_a_lazy_leaf_of_another_shape_is_named(run: Any) -> None:
    wrong = ya.Lazy((2, 3), torch.float32, lambda layer: torch.zeros(3 if layer == 0 else 4))
    with pytest.raises(ValueError, match=r"s.w of layer 1: loaded torch.float32 \(4,\), expected shape \(3,\)"):
        run({"s": ya.Stacked({"w": wrong})})
    with pytest.raises(ValueError, match=r"w: loaded torch.float32 \(4,\), expected shape \(2, 3\)"):
        run({"w": wrong})


@pytest.mark.parametrize("run", [sharding, ya.materialize])
def test_an_initializer_that_makes_another_shape_is_named(run: Any) -> None:
    wrong = ya.Param((2, 3), init=lambda generator, shape, dtype: torch.zeros(1))
    with pytest.raises(ValueError, match=r"s.w: its initializer made shape \(1,\), expected \(3,\)"):
        run({"s": ya.Stacked({"w": wrong})})
    none = ya.Param((2, 3), init=lambda generator, shape, dtype: np.ones(shape))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"s.w: its initializer returned ndarray"):
        run({"s": ya.Stacked({"w": none})})


OF_OTHERS = {
    "NumPy": lambda generator, shape, dtype: torch.from_numpy(np.random.standard_normal(shape)),
    "NumPy, unseeded": lambda generator, shape, dtype: torch.from_numpy(np.random.default_rng().random(shape)),
    "Python": lambda generator, shape, dtype: torch.full(shape, random.random()),
}


@pytest.mark.parametrize("init", OF_OTHERS.values(), ids=OF_OTHERS)
@pytest.mark.parametrize("run", [sharding, ya.materialize])
def test_an_initializer_that_draws_from_elsewhere_is_named(run: Any, init: Any) -> None:
    with pytest.raises(ValueError, match=r"the initializer of s.w has made other values when it was called again"):
        run({"s": ya.Stacked({"w": ya.Param((2, 3), init=init)})})


def test_an_initializer_may_draw_from_either_generator_of_torch() -> None:
    """Those of `torch.nn.init` take none, in older versions."""
    for init in (torch.nn.init.xavier_uniform_, torch.nn.init.orthogonal_):
        tree = {"w": ya.Param((4, 3), init=lambda generator, shape, dtype: init(torch.empty(shape, dtype=dtype)))}  # noqa: B023
        torch.manual_seed(1)
        once = ya.materialize(tree)
        torch.manual_seed(2)
        assert_equal(once, ya.materialize(tree))


def test_float64_is_trained_in_float32_with_a_warning_unless_it_is_asked_for() -> None:
    tree = {"v": torch.ones(2), "w": torch.ones(2, dtype=torch.float64)}
    with pytest.warns(UserWarning, match=r"^w is float64, and is trained in float32, the default"):
        sharding(tree)
    for asked in (ya.Precision(), ya.Precision(torch.float64)):
        with warnings.catch_warnings(action="error"):
            state = ya.shard(tree, ya.optim.sgd(0.1), mesh=one_rank(), precision=asked)
        assert optree.tree_leaves(state.params)[1].dtype == asked.param


def test_one_tensor_under_two_names_is_warned_of() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    with pytest.warns(UserWarning, match=r"^shard: 0.weight and 1.weight are one tensor, and are trained as two"):
        sharding(module.state_dict())
    one = torch.ones(4, 4)
    with warnings.catch_warnings(action="error"):
        sharding({"a": one[:2], "b": one[2:], "c": ya.frozen(one), "d": one[:0], "e": one[:0]})


def test_other_leaves_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"a.b: expected a Param, a tensor or a Lazy leaf, got float"):
        ya.materialize({"a": {"b": 1.0}})
    with pytest.raises(TypeError, match=r"init takes a tree of Param, got a Tensor: to shard tensors use ya.shard"):
        ya.init({"w": torch.ones(2)}, ya.optim.sgd(0.1), mesh=one_rank())
