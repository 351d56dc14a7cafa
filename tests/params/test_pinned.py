"""Pinned leaves: one unit for all layers of a stack, gathered once per step; else as if nothing were marked.

Values and gradients of the problem "pinned" are compared with the plain loop in tests/steps/test_exact_gradients.py;
checkpoints are in tests/checkpoint/test_resharding.py.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, SCHEDULES, Batch, Params, base_loss, base_params, layer
from tests.harness.small import assert_equal, one_rank, param
from tests.steps.test_collectives import counted
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.params.tree_layout import tree_layout

KINDS = (ya.schedules.Gather, ya.schedules.Reduce)
WORLDS = on_ranks(1, 2, 3)
DECAY = ya.optim.adamw(1e-2, weight_decay=0.1, mask=lambda path, p: len(p.shape) > 1)
TX = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), DECAY)


def tree(mark: Any = ya.Pinned) -> Params:
    """Two pinned leaves of three layers, one of them without axes of its own, beside three others."""
    stack = layer(3)
    return base_params(3)._replace(layers=ya.Stacked(stack._replace(gate=mark(stack.gate), size=mark(stack.size))))


def unmarked(leaf: Any) -> Any:
    return leaf


def groups(abstract: Any) -> list[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], bool]]:
    return [(g.name, g.units, g.layout.shapes, g.trainable) for _, g in tree_layout(abstract)[0].groups]


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
    assert [names for _, g in layout.groups if g.name == "s.pinned" for names in g.layout.names] == [
        "s.a.gain",
        "s.d.z",
    ]


def test_the_marker_is_transparent_on_plain_trees() -> None:
    marked, plain = (ya.PlainState.create(tree(mark), TX, seed=1).params for mark in (ya.Pinned, unmarked))
    assert isinstance(marked.layers.tree.gate, ya.Pinned)
    assert optree.tree_leaves(ya.params.leaf_names(tree())) == optree.tree_leaves(ya.params.leaf_names(tree(unmarked)))
    assert_equal(marked, plain)
    assert_equal(*(ya.value_and_grad(base_loss)(params, batch_of(0)) for params in (marked, plain)))
    assert_equal(*(ya.map_whole_layers(lambda w: w._replace(gate=2 * w.gate), p.layers) for p in (marked, plain)))


@pytest.mark.parametrize(
    ("abstract", "message"),
    [
        ({"a": {"w": param(2), "gain": ya.Pinned(param(3))}}, "a.gain: a Pinned outside of a Stacked; "),
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
    assert counts[("gather", "layers")] > 5 and counts[("reduce", "layers")] == 5 * parts
    for name in ("layers.pinned", "layers.side.pinned", "more.pinned"):
        assert counts[("gather", name)] == 1 and counts[("reduce", name)] == parts


def test_a_frozen_pinned_unit_is_never_reduced() -> None:
    problem = PROBLEMS["frozen"]
    state = ya.init(problem.params(3), TX, mesh=one_rank())
    program = ya.train_step(problem.loss, TX, microbatches=3).lower(state, batch_of(0))
    unit = next(unit.id for unit in program.trace.units if unit.name == "more.frozen.pinned")
    assert sum(unit in visit.units for visit in program.trace.visits) == 3
    assert not any(unit in visit.trained for visit in program.trace.visits)
    gathers, reductions = (sum(unit in op.units for op in program.ops if isinstance(op, kind)) for kind in KINDS)
    assert gathers <= 1 and reductions == 0  # a schedule may leave what never changes in its slot from step to step


@WORLDS
def test_a_stack_that_is_all_pinned(mesh: Any) -> None:
    """Nothing but pinned leaves in a stack, alone and beside another stack in the same scan; unrolled."""

    def loss(params: Any, batch: Batch) -> Tensor:
        x = batch["tokens"].float()
        x, _ = ya.scan(lambda x, w: (torch.tanh(x * w["a"] + w["b"]), None), x, params["s"], unroll=2)
        x, _ = ya.scan(lambda x, w: (torch.tanh(x @ w[1] + w[0]["a"]), None), x, (params["s"], params["t"]))
        return x.square().sum()

    abstract = {"s": ya.Stacked(ya.Pinned({"a": param(3, 5), "b": param(3)})), "t": ya.Stacked(param(3, 5, 5))}
    state, oracle = ya.init(abstract, TX, mesh=mesh), ya.PlainState.create(abstract, TX)
    assert [u.stack for u in state.memory.units] == [None, "t", "t", "t"]
    batch = batch_of(0)
    for schedule in ("zero3", "zero3-remat-all", "zero2"):
        function = ya.value_and_grad(loss, schedule=SCHEDULES[schedule])
        expected = function(oracle.params, batch)
        for call in ("first", "second"):
            compare(ya.unshard(function(state.params, batch)), expected, 1e-6, f"{schedule}, {call}")
    got = torch.func.grad(loss)(state.params, batch)
    compare(
        ya.unshard(got), torch.func.grad(loss)(ya.params.without_markers(oracle.params), batch), 1e-6, "torch.func.grad"
    )


def test_a_slice_of_the_pinned_unit_is_no_output() -> None:
    state = ya.init(tree(), TX, mesh=one_rank())
    with pytest.raises(RuntimeError, match="is a view of the block's weights"):
        ya.value_and_grad(lambda p: ya.scan(lambda x, w: (w.gate, None), torch.zeros(7), p.layers)[0].sum())(
            state.params
        )


# ---- whole trees


@WORLDS
def test_masks_and_map_layers(mesh: Any) -> None:
    """Masks and map_whole_layers."""
    marked, plain = (ya.init(tree(mark), TX, mesh=mesh, seed=1).params for mark in (ya.Pinned, unmarked))
    seen: list[list[tuple[str, tuple[int, ...]]]] = [[], []]

    def masked(params: Any, found: list[Any]) -> Any:
        def rule(path: str, p: ya.Param) -> bool:
            found.append((path, p.shape))
            return path in ("layers.gate", "layers.up")

        return ya.unshard(
            optree.tree_map(torch.where, ya.params.leaf_mask(rule, params), params, ya.normal_like(0, params))
        )

    compare(masked(marked, seen[0]), masked(plain, seen[1]), 0.0, "leaf_mask and normal_like")
    assert sorted(seen[0]) == sorted(seen[1]) and ("layers.gate", (7,)) in seen[0]

    def changed(w: Any, other: Any, at: Tensor) -> Any:
        out = w._replace(gate=w.gate * at + other.gate, size=w.size - at, up=w.up.flip(0))
        for leaf in optree.tree_leaves((w, other)):
            leaf.zero_()  # what comes in may be overwritten, and is neither the parameters nor another layer's
        return w._replace(down=w.down + 1, **{name: getattr(out, name) for name in ("gate", "size", "up")})

    pairs = []
    for params in (marked, plain):
        before, at = ya.unshard(params), torch.arange(3.0)
        out = ya.map_whole_layers(changed, params.layers, ya.normal_like(0, params).layers, at)
        assert isinstance(out, ya.Sharded)
        for (_, group, _), leaf in zip(out.group_leaves(), out.leaves, strict=True):
            rank, n = mesh.get_local_rank(), leaf.shape[-1]
            used = torch.zeros(n, dtype=torch.bool)
            for piece in group.layout.pieces(rank * n, (rank + 1) * n):
                used[piece.start : piece.stop] = True
            assert not leaf[..., ~used].any(), "gaps and padding are zero"
        statistics = ya.map_whole_layers(lambda w: {"norm": w.gate.norm(), "size": w.size}, params.layers)
        compare(ya.unshard(params), before, 0.0, "map_whole_layers leaves the parameters alone")
        pairs.append((ya.unshard(out), statistics))
    compare(pairs[0], pairs[1], 0.0, "map_whole_layers")

    # gradients of frozen leaves, and moments, which have none
    frozen = {"s": ya.Stacked({"w": param(3, 5), "gain": ya.frozen(ya.Pinned(param(3, 7)))})}
    state = ya.init(frozen, TX, mesh=mesh)
    grads = ya.grad(
        lambda p: ya.scan(lambda x, w: (x + (w["w"] * w["gain"][0]).sum(), None), torch.zeros(()), p["s"])[0]
    )
    sums = ya.map_whole_layers(lambda g: (g["w"].abs().sum(), g["gain"].abs().sum()), grads(state.params)["s"])
    assert sums[0].gt(0).all() and sums[1].eq(0).all()
    assert ya.map_whole_layers(lambda w: w, trainable(state.params)["s"]).leaves[0].shape[0] == 3
