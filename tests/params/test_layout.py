"""Flat layouts: where every leaf lies, for any shapes and any number of ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import yafsdp_fn as ya
from tests.harness.small import param
from yafsdp_fn.params.layout import FlatLayout
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.util.mesh_axes import ALIGN, round_up

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)
ranks_strategy = st.integers(1, 9)


def layout_of(*found: tuple[int, ...]) -> FlatLayout:
    return FlatLayout(tuple(map(str, range(len(found)))), tuple(found))


@given(shapes, ranks_strategy)
def test_offsets_and_padding(found: list[tuple[int, ...]], ranks: int) -> None:
    layout = layout_of(*found)
    at = 0
    for offset, size, shape in zip(layout.offsets, layout.sizes, found, strict=True):
        assert offset % ALIGN == 0
        assert size == math.prod(shape)
        assert 0 <= offset - at < ALIGN  # leaves in order, none on another, gaps only for alignment
        at = offset + size
    assert layout.numel == at
    n = layout.shard_numel(ranks)
    assert n % ALIGN == 0
    assert layout.padded_numel(ranks) == n * ranks
    assert 0 <= n * ranks - layout.numel < ALIGN * ranks  # padding at the tail, less than one step of alignment a rank
    assert layout.padded_numel(1) == round_up(layout.numel)


# ---- trees


class Net(NamedTuple):
    embed: Any
    layers: Any
    head: Any = None


def groups_of(tree: Any) -> list[tuple[str, tuple[int, ...], tuple[str, ...], bool]]:
    return [(g.name, g.units, g.layout.names, g.trainable) for g in tree_layout(tree)[0].groups]


def test_a_marker_below_a_container_makes_its_children_entries() -> None:
    tree = {
        "encoder": {"embed": param(3), "layers": ya.Stacked([param(2, 3)])},
        "decoder": {"a": param(1), "b": param(2)},
    }
    assert [name for name, *_ in groups_of(tree)] == ["decoder", "encoder.embed", "encoder.layers"]


def test_frozen_around_a_container_moves_down_onto_its_stacks_and_units() -> None:
    frozen = ya.frozen({"layers": ya.Stacked({"w": param(2, 3)}), "norm": {"w": param(3)}}, torch.bfloat16)
    layout, _ = tree_layout({"encoder": frozen, "head": param(1)})
    assert [(e.name, g.units, g.trainable, g.dtype) for e in layout.entries for g in e.groups] == [
        ("encoder.layers", (0, 1), False, torch.bfloat16),
        ("encoder.norm", (2,), False, torch.bfloat16),
        ("head", (3,), True, None),
    ]
    assert optree.tree_unflatten(layout.container, ["layers", "norm", "head"]) == {
        "encoder": {"layers": "layers", "norm": "norm"},
        "head": "head",
    }


def test_the_dtype_of_frozen_is_the_innermost() -> None:
    tree = {"x": ya.frozen({"a": ya.frozen(param(2), torch.float16), "b": param(3)}, torch.bfloat16)}
    found = {g.layout.names: (g.dtype, g.trainable) for g in tree_layout(tree)[0].groups}
    assert found == {("x.a",): (torch.float16, False), ("x.b",): (torch.bfloat16, False)}


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (param(3), [""]),
        (ya.Stacked(param(2, 3)), [""]),
        ([param(3), {"w": param(2)}], ["0", "1"]),
        ({"a": None, "b": param(2)}, ["b"]),
        ({"a": ya.Unit(param(2)), "b": {"c": ya.Unit([param(1)]), "d": param(1)}}, ["a", "b.c", "b.d"]),
    ],
)
def test_roots_of_every_kind(tree: Any, names: list[str]) -> None:
    layout, leaves = tree_layout(tree)
    assert [entry.name for entry in layout.entries] == names
    assert [entry.spec.num_leaves for entry in layout.entries] == [len(found) for found in leaves]
    rebuilt = optree.tree_unflatten(layout.container, [f"<{name}>" for name in names])
    assert optree.tree_leaves(rebuilt) == [f"<{name}>" for name in names]
    assert type(rebuilt) is (str if names == [""] else type(tree))


def test_one_object_at_two_places_is_two_entries() -> None:
    shared = {"w": param(3)}
    layout, _ = tree_layout({"a": shared, "b": {"c": shared, "d": ya.Unit(param(1))}})
    assert [(e.name, e.groups[0].units) for e in layout.entries] == [("a", (0,)), ("b.c", (1,)), ("b.d", (2,))]


def test_equal_trees_have_equal_layouts_whatever_their_values() -> None:
    one, two = (tree_layout({"a": ya.Stacked({"w": torch.rand(2, 3)})})[0] for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != tree_layout({"a": ya.Stacked({"w": torch.rand(2, 4)})})[0]
    assert one != tree_layout({"a": ya.Stacked({"w": torch.rand(3, 3)})})[0]
    assert one != tree_layout({"a": {"w": torch.rand(2, 3)}})[0]
    assert one != tree_layout({"a": ya.frozen(ya.Stacked({"w": torch.rand(2, 3)}))})[0]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"a": ya.Stacked({"w": param(2, 3), "b": param(3, 3)})},
            r"Stacked 'a': leaves disagree .*a.b has 3, a.w has 2",
        ),
        (
            {"a": ya.Stacked({"w": param()})},
            r"a.w: a leaf of a Stacked needs a leading layer axis, got torch.float32 \(\)",
        ),
        ({"a": ya.Stacked({"w": param(0, 3)})}, "Stacked 'a' has no layers"),
        ({"a": ya.Stacked({})}, "Stacked 'a' has no leaves"),
        ({"a": ya.Stacked({"w": ya.Stacked(param(2, 3))})}, "a.w: a Stacked inside .*; stacks do not nest"),
        ({"a": ya.Unit(ya.Stacked(param(2, 3)))}, "a: .*Stacked"),
        ({"a": "text"}, "a: expected a Param, a tensor or a Lazy leaf, got str"),
        (
            {"a": {"b": torch.arange(3)}},
            "a.b: parameters are floating point, got torch.int64; pass integers in the batch",
        ),
    ],
)
def test_errors_name_the_leaf(tree: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tree_layout(tree)
