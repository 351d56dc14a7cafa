"""Parameter trees: markers as pytree nodes in both registries, names, stripping."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

import yafsdp_fn as ya
from yafsdp_fn.params.markers import has_marker, is_marker
from yafsdp_fn.params.tree import named_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


def sample() -> Any:
    return {
        "b": ya.Stacked({"w": 1, "u": ya.Unit([2, 3])}),
        "a": Pair(ya.frozen({"x": 4}, dtype=torch.bfloat16), (5, None, ya.Unit(ya.frozen(6)))),
    }


PATHS = ["a.left.x", "a.right.0", "a.right.2", "b.u.0", "b.u.1", "b.w"]


def test_flatten_and_unflatten_in_both_registries() -> None:
    leaves, spec = optree.tree_flatten(sample())
    assert leaves == [4, 5, 6, 2, 3, 1]  # optree sorts keys; None is no leaf
    assert optree.tree_unflatten(spec, leaves) == sample()
    theirs, their_spec = torch_pytree.tree_flatten(sample())
    assert theirs == [1, 2, 3, 4, 5, None, 6]
    assert torch_pytree.tree_unflatten(theirs, their_spec) == sample()


def test_structures_differ_by_marker_and_by_the_dtype_of_frozen() -> None:
    nodes = [1, ya.Stacked(1), ya.Unit(1), ya.frozen(1), ya.frozen(1, torch.bfloat16), ya.Unit(ya.Unit(1))]
    assert len({optree.tree_structure(node) for node in nodes}) == len(nodes)
    assert optree.tree_structure(ya.frozen(1, torch.bfloat16)) == optree.tree_structure(ya.frozen(2, torch.bfloat16))


def test_names_are_dotted_paths_without_markers() -> None:
    assert [path for path, _ in named_leaves(sample())] == PATHS
    assert ya.params.leaf_names(sample())["b"] == ya.Stacked({"w": "b.w", "u": ya.Unit(["b.u.0", "b.u.1"])})
    assert ya.params.leaf_names(ya.Stacked(1)) == ya.Stacked("")
    assert list(named_leaves(7)) == [("", 7)]


def test_strip() -> None:
    stripped = ya.params.without_markers(sample())
    assert stripped == {"b": {"w": 1, "u": [2, 3]}, "a": Pair({"x": 4}, (5, None, 6))}
    assert type(stripped["a"]) is Pair
    assert not has_marker(stripped)
    plain = {"a": [1]}
    assert ya.params.without_markers(plain) is plain
    assert ya.params.without_markers(ya.Unit(ya.Stacked(3))) == 3


markers = [ya.Stacked, ya.Unit, ya.frozen]
trees: Any = st.recursive(
    st.integers(),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(st.sampled_from(markers), inner).map(lambda pair: pair[0](pair[1])),
    ),
    max_leaves=12,
)


@given(trees)
def test_properties_of_any_tree(tree: Any) -> None:
    stripped = ya.params.without_markers(tree)
    assert not any(is_marker(node) for node in optree.tree_leaves(stripped, is_leaf=is_marker))
    # stripping moves no leaf and renames none: layouts and checkpoints count on it
    assert list(named_leaves(stripped)) == list(named_leaves(tree))
    assert optree.tree_leaves(ya.params.leaf_names(tree)) == [path for path, _ in named_leaves(tree)]
    assert has_marker(tree) == (optree.tree_structure(stripped) != optree.tree_structure(tree))
    assert optree.tree_map(lambda x: x, tree) == tree == torch_pytree.tree_map(lambda x: x, tree)


@pytest.mark.parametrize("shape", [(-1,), (2.0,), ("a",), (3, None)])
def test_bad_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="expected non-negative integers"):
        ya.Param(shape)


def test_params() -> None:
    param = ya.Param([2, 3])
    assert param.shape == (2, 3)
    assert param.ndim == 2
    assert param.dtype == torch.float32
    assert hash(param) == hash(ya.Param((2, 3)))
    assert param == ya.Param((2, 3)) != ya.Param((3, 2))
    assert optree.tree_leaves({"a": param}) == [param]  # a leaf, not a container of its shape
    with pytest.raises(TypeError, match=r"Param dtype torch.int64: .* pass integers in the batch"):
        ya.Param((1,), torch.int64)
