"""ya.lora in one process: the tree it makes, what blocks see, how int8 is stored, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from benchmarks.counting import tensor_peak
from models import llama
from tests.harness.oracle import check_steps
from tests.harness.pool import on_ranks
from tests.harness.small import L, batch, batches, loss, model, one_rank, param
from tests.models.theirs import draw
from yafsdp_fn.nn import linear
from yafsdp_fn.params.tree import named_leaves
from yafsdp_fn.params.tree_layout import tree_layout

TX = ya.optim.adamw(1e-2)
BF16 = ya.Precision(compute=torch.bfloat16)


def adapter(*, outs: int = 6, ins: int = 5, stored: torch.dtype = torch.float64) -> ya.LowRank:
    """A weight as a block sees it, in float64, whose adapter is not zero."""
    made = torch.randn(outs, ins, dtype=torch.float64)
    steps = None
    if stored == torch.int8:
        steps = made.abs().amax(1) / 127
        made = (made / steps[:, None]).round()
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, ins), (outs, 2)))
    return ya.LowRank(made.to(stored), steps, a, b, 1.5)


def formed(w: ya.LowRank) -> Tensor:
    """The matrix, by its definition."""
    base = w.weight.double() if w.row_scale is None else w.weight.double() * w.row_scale[:, None]
    return base + w.factor * (w.b @ w.a)


# ---- the tree


def groups(tree: Any) -> list[tuple[str, tuple[str, ...], bool, torch.dtype | None]]:
    return [(g.name, g.layout.names, g.trainable, g.dtype) for g in tree_layout(tree)[0].groups]


def test_what_was_one_unit_is_two_and_weights_keep_their_names() -> None:
    assert groups(ya.lora(model(), 2)) == [
        ("embed", ("embed.weight",), False, None),
        ("layers.frozen", ("layers.bias", "layers.down", "layers.up"), False, None),
        ("layers", ("layers.down.a", "layers.down.b", "layers.up.a", "layers.up.b"), True, None),
        ("head", ("head.norm", "head.weight"), False, None),
    ]
    units = ya.init(ya.lora(model(), 2), TX, mesh=one_rank()).memory.units
    assert [u.stack for u in units] == [None, *["layers.frozen", "layers"] * L, None]


def test_stored_in_a_dtype_of_their_own() -> None:
    chosen = ya.lora(model(), 2, lambda path, p: path == "layers.up", dtype=torch.int8)
    assert groups(chosen)[1:4] == [
        ("layers.frozen", ("layers.bias", "layers.down", "layers.up.row_scale"), False, None),
        ("layers.frozen(int8)", ("layers.up.int8",), False, torch.int8),
        ("layers", ("layers.up.a", "layers.up.b"), True, None),
    ]


@on_ranks(1, 2)
def test_a_base_in_float64_has_adapters_in_it(mesh: Any) -> None:
    """A plain tree has them as they are described, and could not be computed with."""
    double = optree.tree_map(lambda p: dataclasses.replace(p, dtype=torch.float64), model())
    state = ya.init(ya.lora(double, 2), TX, mesh=mesh, precision=ya.Precision(torch.float64))
    alone = ya.PlainState.create(ya.lora(double, 2), TX)
    steps = (ya.train_step(loss, TX), state), (ya.train_step(loss, TX), alone)
    check_steps(*steps, batches(mesh, 3), 1e-12)


def test_a_unit_outside_of_stacks_stays_one_entry() -> None:
    made = ya.lora(model(), 2, lambda path, p: path == "head.weight")
    assert groups(made)[2:] == [
        ("head.frozen", ("head.norm", "head.weight"), False, None),
        ("head", ("head.weight.a", "head.weight.b"), True, None),
    ]
    assert isinstance(ya.init(made, TX, mesh=one_rank()).params.head, ya.Sharded)


def test_markers_stay_and_what_is_frozen_keeps_its_dtype() -> None:
    stack = {
        "gain": ya.Pinned(param(L, 5)),
        "w": param(L, 4, 5),
        "side": ya.Unit({"u": param(L, 4, 5), "v": param(L, 4, 5)}),
    }
    tree = {"head": ya.frozen({"w": param(3, 5)}, torch.float32), "layers": ya.frozen(ya.Stacked(stack))}
    made = ya.lora(tree, 1, lambda path, p: path in ("layers.w", "layers.side.u"))
    assert [(name, leaves, trained) for name, leaves, trained, _ in groups(made)] == [
        ("head", ("head.w",), False),
        ("layers.frozen.pinned", ("layers.gain",), False),
        ("layers.side.frozen", ("layers.side.u", "layers.side.v"), False),
        ("layers.side", ("layers.side.u.a", "layers.side.u.b"), True),
        ("layers.frozen", ("layers.w",), False),
        ("layers", ("layers.w.a", "layers.w.b"), True),
    ]
    assert groups(made)[0][3] == torch.float32


def test_it_begins_as_the_model_that_it_is_made_of() -> None:
    plain = ya.init(model(), TX, mesh=one_rank())
    state = ya.init(ya.lora(model(), 2), TX, mesh=one_rank())
    whole = dict(named_leaves(ya.unshard(state)))
    for path, leaf in named_leaves(ya.unshard(plain)):
        assert torch.equal(whole.pop(path), leaf)
    assert not any(leaf.any() for path, leaf in whole.items() if path.endswith(".b"))
    bound = {"layers.down.a": 7**-0.5, "layers.up.a": 5**-0.5}
    for path, limit in bound.items():
        assert 0.5 * limit < whole[path].abs().max() <= limit
        assert whole[path].unique().numel() == whole[path].numel(), "each layer draws its own"
    values = [ya.eval_step(loss)(each, batch())["loss"] for each in (plain, state)]
    assert torch.equal(*values)


def test_where_sees_paths_and_layers() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def where(path: str, p: ya.Param) -> bool:
        seen[path] = p.shape
        return path == "layers.up"

    ya.lora(model(), 2, where)
    assert seen == {
        "embed.weight": (11, 5),
        "layers.bias": (7,),
        "layers.down": (5, 7),
        "layers.up": (7, 5),
        "head.norm": (5,),
        "head.weight": (11, 5),
    }


TIED = torch.randn(4, 5)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ya.lora(model(), 0), ValueError, "lora: rank=0: expected an integer of at least 1"),
        (lambda: ya.lora(model(), 2.0), ValueError, "lora: rank=2.0: expected an integer"),
        (lambda: ya.lora(model(), 2, alpha=0.0), ValueError, "lora: alpha=0.0: expected a positive number, or None"),
        (lambda: ya.lora(model(), 2, dtype=torch.int32), TypeError, r"lora: dtype=torch.int32: expected None, or one"),
        (
            lambda: ya.lora(model(), 2, lambda path, p: False),
            ValueError,
            "lora: no matrix was chosen; where says which of embed.weight, layers.bias, .* and so on",
        ),
        (
            lambda: ya.lora(model(), 2, lambda path, p: "bias" in path),
            ValueError,
            r"lora: where chose layers.bias, of shape \(7,\); an adapter needs a matrix \[out, in\]",
        ),
        (
            lambda: ya.lora(ya.lora(model(), 2), 2),
            ValueError,
            "lora: layers.down has an adapter already; ya.merge_lora adds it to its weight",
        ),
        (
            lambda: ya.lora({"a": TIED, "b": {"w": TIED}}, 2, lambda path, p: path == "b.w"),
            ValueError,
            "lora: b.w and a are one tensor, which an adapter would untie; clone it",
        ),
        (
            lambda: ya.lora({"w": torch.ones(4, 5, dtype=torch.int64)}, 2, lambda path, p: True),
            TypeError,
            "w: parameters are floating point, got torch.int64",
        ),
        (
            lambda: ya.lora(ya.init(model(), TX, mesh=one_rank()).params, 2),
            TypeError,
            "lora: embed is sharded; give the tree that ya.init or ya.shard takes, or ya.unshard's",
        ),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


# ---- what blocks see

USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ya.linear": lambda w, x: ya.linear(x, w),
    "ya.linear with a bias": lambda w, x: ya.linear(x, w, torch.arange(6.0).double()),
    "F.linear": lambda w, x: F.linear(x, w),
    "F.linear by name": lambda w, x: F.linear(input=x, weight=w, bias=torch.arange(6.0).double()),
    "F.linear of it": lambda w, x: F.linear(w, x),
    "x @ w.T": lambda w, x: x @ w.T,
    "w times": lambda w, x: torch.matmul(w, x.T),
    "a slice": lambda w, x: F.linear(x, w[2:5]),
    "elementwise": lambda w, x: (torch.tanh(w) * w.sum(0) + x[:1]) / len(w),
    "an embedding": lambda w, x: ya.embedding(torch.tensor([[0, 5], [3, 3]]), w),
    "a head": lambda w, x: ya.linear_cross_entropy(x, w, torch.tensor([0, 5, 3])),
    "a head in chunks": lambda w, x: ya.linear_cross_entropy(x, w, torch.tensor([0, 5, 3]), chunk=2),
    "its shape": lambda w, x: x.new_ones(w.shape, dtype=w.dtype),
}


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.int8])
@pytest.mark.parametrize("use", list(USES))
def test_a_block_may_use_it_as_the_matrix(use: str, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    w = adapter(stored=stored)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    got = USES[use](w, x)
    expected = USES[use](formed(w), x)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    if expected.requires_grad:
        given = torch.randn_like(expected)
        for a, b in zip(
            *(torch.autograd.grad(y, (w.a, w.b, x), given, allow_unused=True) for y in (got, expected)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.int8])
def test_linear_keeps_the_base_as_it_is_stored(stored: torch.dtype) -> None:
    """Of the weight's size the graph holds nothing else, and x once."""
    w = adapter(outs=60, ins=50, stored=stored)
    x = torch.randn(3, 50, dtype=torch.float64, requires_grad=True)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        ya.linear(x, w)
    large = [t for t in kept.values() if t.numel() >= 60 * 50]
    assert [t.data_ptr() for t in large] == [w.weight.data_ptr()]
    assert large[0].dtype == stored


def test_a_base_that_requires_grad_gets_one() -> None:
    """Unfrozen between steps, or in a plain loop; also where it is stored in another dtype."""
    for stored in (torch.float64, torch.float32, torch.int8):
        w = adapter(stored=stored)
        x = torch.randn(3, 5, dtype=torch.float64)
        moved = (w.weight if w.row_scale is None else w.row_scale).requires_grad_()
        (got,) = torch.autograd.grad(ya.linear(x, w).sum(), moved)
        (expected,) = torch.autograd.grad(F.linear(x, formed(w)).sum(), moved)
        torch.testing.assert_close(got, expected)


def test_a_compiled_block_takes_it() -> None:
    w = {"up": adapter(stored=torch.float32), "down": adapter(outs=5, ins=6)}

    def block(x: Tensor, w: Any) -> Tensor:
        return x + ya.linear(torch.tanh(ya.linear(x, w["up"])), w["down"])

    x = torch.randn(3, 5, dtype=torch.float64)
    assert torch.allclose(torch.compile(block, backend="eager", fullgraph=True)(x, w), block(x, w))


# ---- int8


@pytest.mark.parametrize("how", ["tensors", "lazy", "abstract"])
def test_int8_is_within_half_a_step(how: str) -> None:
    whole = torch.randn(L, 6, 5, generator=torch.Generator().manual_seed(0))
    whole[1, 2] = 0.0
    leaf: Any = {
        "tensors": whole,
        "lazy": ya.Lazy(whole.shape, whole.dtype, lambda layer: whole if layer is None else whole[layer]),
        "abstract": ya.Param((L, 6, 5), init=ya.params.initializers.normal(1.0)),
    }[how]
    made = ya.lora({"layers": ya.Stacked({"w": leaf})}, 2, dtype=torch.int8)
    found = ya.unshard(ya.shard(made, None, mesh=one_rank(), precision=BF16))["layers"]["w"]
    assert found.weight.dtype == torch.int8
    assert found.row_scale.dtype == torch.bfloat16
    steps = found.row_scale.float()[..., None]
    assert found.weight.abs().amax(-1).eq(127).sum() >= L * 6 - 1, "every row has its own"
    if how == "abstract":
        assert 0.5 < (found.weight * steps).std() < 2.0
        return
    assert ((found.weight * steps - whole).abs() <= 0.5001 * steps).all()
    plain = ya.materialize(made)["layers"]["w"]
    assert torch.equal(plain.weight, found.weight), "the steps do not depend on the dtype that holds them"
    assert torch.equal(plain.row_scale, found.row_scale.float())


# ---- a small Llama

CONFIG = llama.Config(vocab=512, embed=128, ffn=384, layers=2, heads=4, kv_heads=2, head_dim=32, max_length=64)


def tokens(rows: int = 2) -> dict[str, Tensor]:
    made = draw(rows, CONFIG.max_length, seed=0, most=CONFIG.vocab)
    return {"tokens": made, "targets": made.roll(-1, 1)}


@pytest.mark.sampled
@pytest.mark.parametrize("how", [{"chunks": 2}, {"unroll": 2}])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_in_chunks_and_several_layers_a_visit(dtype: torch.dtype | None, how: dict[str, int]) -> None:
    tree = ya.lora(llama.params(CONFIG), 4, dtype=dtype)
    found = []
    for options in ({}, how):
        state = ya.init(tree, TX, mesh=one_rank())
        step = ya.train_step(llama.loss(CONFIG, **options), TX)
        for _ in range(3):
            state, metrics = step(state, tokens())
        found.append((metrics["loss"], ya.unshard(state)))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    for a, b in zip(*(optree.tree_leaves(tree) for _, tree in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def measured(tree: Any, remat: Any) -> tuple[int, int]:
    """The most live tensors of a step, and what the planner says."""
    schedule = ya.schedules.zero3(remat=remat)
    predicted = 0

    def build() -> Callable[[int], object]:
        nonlocal predicted
        state = ya.init(tree, TX, mesh=one_rank(), precision=BF16)
        step = ya.train_step(llama.loss(CONFIG), TX, schedule=schedule)
        predicted = ya.planner.predict_memory(step.lower(state, tokens()), device="cpu").peak_bytes

        def run(_: int) -> object:
            nonlocal state
            state, metrics = step(state, tokens())
            return metrics

        return run

    return tensor_peak(build, torch.device("cpu"), 2), predicted


@pytest.mark.nightly
def test_memory_is_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of less and less; beside full fine-tuning: docs/lora.md."""
    monkeypatch.setattr(linear, "LARGE", 1 << 16)  # as in a run
    limit = float("inf")
    for dtype, remat in (
        (None, "none"),
        (torch.int8, "none"),
        (torch.int8, "all"),
    ):
        real, predicted = measured(ya.lora(llama.params(CONFIG), 4, dtype=dtype), remat)
        assert abs(predicted / real - 1) < 0.005
        assert real < limit
        limit = real
