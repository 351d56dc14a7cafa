"""Pinned leaves: one unit for all layers of a stack, gathered once per step; else as if nothing were marked.

Values and gradients of the problem "pinned" are compared with the plain loop in tests/steps/test_exact_gradients.py;
checkpoints are in tests/checkpoint/test_resharding.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, Params, base_params, layer, pinned
from tests.harness.small import one_rank, param
from tests.steps.test_collectives import counted
from yafsdp_fn.params.tree_layout import tree_layout

KINDS = (ya.schedules.Gather, ya.schedules.Reduce)
TX = ya.optim.adamw(1e-2)


def tree() -> Params:
    """Two pinned leaves of three layers, one of them without axes of its own, beside three others."""
    return base_params(3)._replace(layers=ya.Stacked(pinned(layer(3), "gate", "size")))


def groups(abstract: Any) -> list[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], bool]]:
    return [(g.name, g.units, g.layout.shapes, g.trainable) for g in tree_layout(abstract)[0].groups]


# ---- layout


def test_one_unit_for_all_layers_before_those_of_the_first_layer() -> None:
    assert groups(tree()) == [
        ("embed", (0,), ((37, 7),), True),
        ("layers.pinned", (1,), ((3, 7), (3,)), True),
        ("layers", (2, 3, 4), ((5, 7), (5,), (7, 5)), True),
        ("head", (5,), ((7,), (37, 7)), True),
    ]
    units = ya.init(tree(), TX, mesh=one_rank()).memory.units
    assert [(u.id, u.name, u.stack, u.layer) for u in units][1:3] == [
        (1, "layers.pinned", None, 0),
        (2, "layers[0]", "layers", 0),
    ]
    assert units[1].numel == 24 + 3  # the second leaf is aligned


def test_units_and_what_is_frozen_have_pinned_units_of_their_own() -> None:
    p = param(2, 3)
    stack = {
        "a": {"w": p, "gain": ya.Pinned(p)},
        "b": ya.Unit({"w": p, "gain": ya.Pinned(p)}),
        "c": ya.frozen({"w": p, "gain": ya.Pinned(p)}),
        "d": ya.Pinned({"x": ya.frozen(p, torch.bfloat16), "y": ya.Unit(p), "z": ya.Pinned(p)}),
    }
    assert {name: units for name, units, *_ in groups({"s": ya.Stacked(stack)})} == {
        "s.pinned": (0,),
        "s.b.pinned": (1,),
        "s.frozen.pinned": (2,),
        "s.frozen(bfloat16).pinned": (3,),
        "s.d.y.pinned": (4,),
        "s": (5, 8),
        "s.b": (6, 9),
        "s.frozen": (7, 10),
    }
    layout, _ = tree_layout({"s": ya.Stacked(stack)})
    assert [names for g in layout.groups if g.name == "s.pinned" for names in g.layout.names] == [
        "s.a.gain",
        "s.d.z",
    ]


@pytest.mark.parametrize(
    ("abstract", "message"),
    [
        ({"a": {"w": param(2), "gain": ya.Pinned(param(3))}}, "a.gain: a Pinned outside of a Stacked; "),
        ({"a": {"b": param(2)}, "a.b": param(2)}, "two leaves are called a.b: rename one"),
        (ya.Pinned(param(3)), "params: a Pinned outside of a Stacked"),
        ({"a": ya.frozen({"gain": ya.Pinned(param(3))})}, "a.gain: a Pinned outside of a Stacked"),
        ({"a": ya.Unit({"gain": ya.Pinned(param(3))})}, "a.gain: a Pinned outside of a Stacked"),
        ({"a": ya.Pinned(ya.Stacked(param(2, 3)))}, "a: a Pinned outside of a Stacked"),
        ({"a": ya.Stacked(ya.Pinned(ya.Stacked(param(2, 3))))}, "a: a Stacked inside a Unit or another Stacked"),
        (
            {"a": ya.Stacked({"w": param(2, 3), "gain": ya.Pinned(param(3, 3))})},
            "leaves disagree on the number of layers: a.gain has 3, a.w has 2",
        ),
        ({"a": ya.Stacked({"w": param(2, 3), "gain": ya.Pinned(param())})}, "a.gain: a leaf of a Stacked needs a lead"),
        (
            {"a": ya.Stacked({"w": ya.Pinned(param(2)), "pinned": ya.Unit(param(2)), "v": param(2)})},
            "a.pinned: a Unit here has the name of other leaves of the stack: pinned, frozen, or of their own dtype",
        ),
    ],
)
def test_errors(abstract: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ya.init(abstract, TX, mesh=one_rank())


# ---- steps


@on_ranks(2)
@pytest.mark.parametrize("parts", [1, 3])
def test_gathered_once_per_step_under_zero3(mesh: Any, parts: int) -> None:
    counts = counted(mesh, "pinned", 5, "zero3", parts)
    assert counts[("gather", "layers")] > 5
    assert counts[("reduce", "layers")] == 5 * parts
    for name in ("layers.pinned", "layers.side.pinned", "more.pinned"):
        assert counts[("gather", name)] == 1
        assert counts[("reduce", name)] == parts


def test_a_frozen_pinned_unit_is_never_reduced() -> None:
    problem = PROBLEMS["frozen"]
    state = ya.init(problem.params(3), TX, mesh=one_rank())
    program = ya.train_step(problem.loss, TX, microbatches=3).lower(state, batch_of(0))
    unit = next(unit.id for unit in program.trace.units if unit.name == "more.frozen.pinned")
    assert sum(unit in visit.units for visit in program.trace.visits) == 3
    assert not any(unit in visit.trained for visit in program.trace.visits)
    gathers, reductions = (sum(unit in op.units for op in program.ops if isinstance(op, kind)) for kind in KINDS)
    assert gathers <= 1 and reductions == 0  # a schedule may leave what never changes in its slot from step to step


def test_a_slice_of_the_pinned_unit_is_no_output() -> None:
    state = ya.init(tree(), TX, mesh=one_rank())
    with pytest.raises(RuntimeError, match="is a view of the block's weights"):
        ya.value_and_grad(lambda p: ya.scan(lambda x, w: (w.gate, None), torch.zeros(7), p.layers)[0].sum())(
            state.params
        )
