"""Llama and its relatives over axes of the mesh, against the plain loop on whole weights without any of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import yafsdp_fn as ya
from models import gpt2, llama, mistral, mixtral, qwen3
from models.parts import attention, decoding
from models.parts.axes import Axes, cross_entropy
from tests.axes.test_exact import FLOAT64, close
from tests.harness.marks import by_name
from tests.harness.pool import on_ranks
from yafsdp_fn.schedules import assign, one_f_one_b, zero3

SIZE: dict[str, Any] = {"vocab": 24, "embed": 16, "ffn": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4}
S, ROWS, STEPS = 16, 4, 3

TENSOR = Axes(tensor=True)
SEQUENCE = Axes(tensor=True, sequence=True)
CONTEXT = Axes(context=True)
ALL = Axes(tensor=True, sequence=True, context=True)
EXPERT = Axes(expert=True)


FAMILIES: dict[str, Any] = {module.MODEL_TYPE: module for module in (llama, qwen3, mistral, gpt2, mixtral)}
NO: Mapping[str, Any] = {}


class Case(NamedTuple):
    """mesh: sizes of its axes; axes: of the model; more: of the config; loss: options of that; capacity: of the loss,
    also on plain tensors; alike: all tokens of a row are one"""

    mesh: dict[str, int]
    axes: Axes
    more: Mapping[str, Any] = NO
    family: str = "llama"
    documents: bool = False
    recomputed: bool = False
    loss: Mapping[str, Any] = NO
    microbatches: int = 1
    capacity: float | None = None
    alike: bool = False


def config_of(case: Case) -> Any:
    shape = {**SIZE, **case.more}
    if case.family == "gpt2":
        shape = {name: value for name, value in shape.items() if name not in ("kv_heads", "head_dim")}
    return FAMILIES[case.family].Config(max_length=2 * S, **shape)


def batch_of(step: int, documents: bool = False, alike: bool = False) -> dict[str, Tensor]:
    """The global batch of a step. Some targets do not count, those of one row none."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(SIZE["vocab"], (ROWS, S), generator=generator) for _ in range(2))
    targets[torch.rand(ROWS, S, generator=generator) < 0.3] = -100
    targets[1, : S // 2 + 3] = -100
    tokens = tokens[:, :1].expand_as(tokens).contiguous() if alike else tokens
    batch = {"tokens": tokens, "targets": targets}
    if documents:
        batch["documents"] = (torch.rand(ROWS, S, generator=generator) < 0.2).cumsum(1)
    return batch


def optimizer() -> Any:
    # the gradient of a bias of keys (GPT-2) is zero but for rounding, which a smaller eps would make large
    return ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2, eps=1e-6, weight_decay=0.1))


def wide(params: Any) -> Any:
    """The parameters with larger values, in float64: softmaxes and norms are not near their centres."""

    def one(leaf: Any) -> Any:
        return ya.Param(leaf.shape, torch.float64, ya.params.initializers.normal(0.3), leaf.split)

    return optree.tree_map(one, params)


def trained(case: Case, state: Any, loss: Any, cut: Any, **options: Any) -> Any:
    """Value and gradients of the first batch, losses and norms of the steps, and the parameters after them."""
    both = ya.value_and_grad(loss, **options)(state.params, cut(batch_of(0, case.documents, case.alike)))
    step = ya.train_step(loss, optimizer(), **options)
    found = []
    for number in range(STEPS):
        state, metrics = step(state, cut(batch_of(number, case.documents, case.alike)))
        found.append((metrics["loss"], metrics["grad_norm"]))
    return *both, found, state


def stages_of(case: Case) -> Any:
    if "stage" not in case.mesh:
        return None
    config = config_of(case)
    family = FAMILIES[case.family]
    params = family.params(config, **case.axes.options)
    trace = ya.planner.trace(family.loss(config), params, batch_of(0, case.documents))
    return assign(trace, case.mesh["stage"])


def exact(_: Any, case: Case) -> None:
    config, family, axes, stages = config_of(case), FAMILIES[case.family], case.axes, stages_of(case)
    mesh = ya.mesh(device="cpu", **case.mesh)
    params = wide(family.params(config, **axes.options))
    state = ya.init(params, optimizer(), mesh=mesh, precision=FLOAT64, stages=stages)
    limit = {} if case.capacity is None else {"capacity": case.capacity}
    loss = family.loss(config, axes=axes, **case.loss, **limit)
    schedule = zero3(remat="all" if case.recomputed else "none")
    schedule = schedule if stages is None else one_f_one_b(schedule)
    how = {"schedule": schedule, "microbatches": case.microbatches}
    got = trained(case, state, loss, functools.partial(axes.shard_batch, mesh=mesh), **how)
    plain = ya.PlainState.create(wide(family.params(config)), optimizer())
    want = trained(case, plain, family.loss(config, **limit), lambda batch: batch)
    close(got[0], want[0], "loss")
    close(got[1], want[1], "gradient")
    close(got[2], want[2], "metrics")
    close(got[3].params, want[3].params, "parameters")


CASES = {
    "tensor": Case({"tensor": 2}, TENSOR),
    "sequence": Case({"tensor": 2}, SEQUENCE),
    "context": Case({"context": 2}, CONTEXT),
    "tied": Case({"tensor": 2}, TENSOR, {"tied": True}, recomputed=True),
    "qwen3": Case({"tensor": 2}, SEQUENCE, {"tied": True}, family="qwen3", microbatches=2),
    "chunks": Case({"tensor": 2}, SEQUENCE, loss={"chunks": 2}),
    "documents": Case({"context": 2}, CONTEXT, documents=True, recomputed=True),
    "mistral": Case({"context": 2}, CONTEXT, {"window": 5}, family="mistral"),
    "documents, a window and chunks": Case(
        {"context": 2}, CONTEXT, {"window": 5}, family="mistral", documents=True, loss={"chunks": 2}
    ),
    "gpt2": Case({"context": 2}, CONTEXT, family="gpt2"),
    "gpt2, tensor": Case({"tensor": 2}, TENSOR, family="gpt2"),
    "gpt2, sequence": Case({"tensor": 2}, SEQUENCE, {"tied": False}, family="gpt2", loss={"chunks": 2}),
    "mixtral": Case({"context": 2}, CONTEXT, {"experts": 4, "router_loss": True, "router_coef": 0.1}, family="mixtral"),
    "one rank of each": Case({"shard": 2, "tensor": 1, "context": 1}, ALL),
    "none of these axes": Case({"shard": 2}, ALL),
    "the model is not split": Case({"tensor": 2}, Axes()),
    "shard, tensor": Case({"shard": 2, "tensor": 2}, SEQUENCE, recomputed=True, microbatches=2),
    "tensor, context": Case({"tensor": 2, "context": 2}, ALL, {"tied": True}, documents=True),
    "context of four": Case({"context": 4}, CONTEXT, recomputed=True),
    "tensor of four": Case({"tensor": 4}, SEQUENCE, {"kv_heads": 4}),
    "shard, context": Case({"shard": 2, "context": 2}, CONTEXT),
    "stage, tensor": Case({"stage": 2, "tensor": 2}, SEQUENCE, {"tied": True}, loss={"chunks": 2}, microbatches=2),
    "stage, context": Case({"stage": 2, "context": 2}, CONTEXT, documents=True, recomputed=True, microbatches=2),
}
NIGHTLY = {
    "chunks",
    "documents",
    "mistral",
    "gpt2",
    "one rank of each",
    "gpt2, tensor",
    "tensor, context",
    "stage, tensor",
    "context of four",
    "tensor of four",
    "shard, context",
    "stage, context",
}
"""Of each kind another case is there daily."""


def on_their_ranks(cases: Mapping[str, Case], waiting: Collection[str]) -> list[Any]:
    """Numbers of ranks and cases under their names, of which those that wait run nightly."""
    return [
        pytest.param(math.prod(case.mesh.values()), case, id=name, marks=[pytest.mark.nightly] * (name in waiting))
        for name, case in cases.items()
    ]


@on_ranks()
@pytest.mark.parametrize(("world", "case"), on_their_ranks(CASES, NIGHTLY))
def test_exact(mesh: Any, case: Case) -> None:
    exact(mesh, case)


class Shapes(TorchDispatchMode):
    """Collects the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in optree.tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


@on_ranks(2)
def test_no_rank_has_all_logits(_: Any) -> None:
    leaf = {"w": ya.Param((10, 8), split={"tensor": -2})}
    mesh = ya.mesh(tensor=2, device="cpu")
    generator = torch.Generator().manual_seed(1)
    x, matrix = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 6, 8), (10, 8)))
    targets = torch.randint(10, (2, 6), generator=generator)
    targets[0, 2:5] = -100
    state = ya.shard({"w": matrix}, like=leaf, mesh=mesh, precision=FLOAT64)

    def loss(entropy: Any) -> Any:
        def head(w: Any, x: Tensor, targets: Tensor) -> Tensor:
            return entropy(3 * x, w["w"], targets)

        return lambda params, x, targets: ya.Mean(ya.apply(head, params, x, targets), (targets != -100).sum())

    want, gradient = ya.value_and_grad(loss(ya.linear_cross_entropy))({"w": matrix}, x, targets)
    for nbytes, rows in ((1 << 20, 12), (3 * 5 * 8, 3), (8, 1)):
        with Shapes() as shapes:
            got, own = ya.value_and_grad(loss(functools.partial(cross_entropy, nbytes=nbytes)))(
                state.params, x, targets
            )
        close(got, want, "loss")
        close(own, {"w": gradient["w"]}, "gradient")
        logits = {shape for shape in shapes.seen if shape[-1:] == (5,)}
        assert max(shape[0] for shape in logits if len(shape) == 2 and shape != (8, 5)) == rows, logits
        assert not any(shape[-1:] == (10,) and len(shape) > 1 for shape in shapes.seen)


@on_ranks(2)
def test_rounding_in_bf16(_: Any) -> None:
    """Gradients in bf16 are as far from those in float64 with the layers over two ranks as on one."""
    case = Case({"tensor": 2}, TENSOR)
    apart = []
    config = config_of(case)
    mesh = ya.mesh(tensor=2, device="cpu")
    for axes, dtype in ((Axes(), torch.float64), (Axes(), torch.bfloat16), (TENSOR, torch.bfloat16)):
        precision = ya.Precision(torch.float64, dtype) if dtype == torch.bfloat16 else FLOAT64
        state = ya.init(wide(llama.params(config, axes=axes)), mesh=mesh, precision=precision)
        _, gradient = ya.value_and_grad(llama.loss(config, axes=axes))(state.params, batch_of(0))
        apart.append(ya.unshard(gradient))
    exact, one, two = apart
    error_of_one, error_of_two = (
        ya.global_norm(optree.tree_map(lambda a, b: a.double() - b.double(), each, exact)) / ya.global_norm(exact)
        for each in (one, two)
    )
    assert 1e-3 < error_of_one < 0.1, error_of_one
    assert 0.5 < error_of_two / error_of_one < 1.5, (error_of_one, error_of_two)


@on_ranks(2)
def test_what_cannot_be_is_refused_by_name(_: Any) -> None:
    mesh = ya.mesh(tensor=2, device="cpu")
    batch = batch_of(0)

    def run(made: Axes, run: Axes, batch: dict[str, Tensor] = batch, **more: Any) -> None:
        config = config_of(Case({}, run, more))
        state = ya.init(llama.params(config, axes=made), mesh=mesh)
        ya.value_and_grad(llama.loss(config, axes=run))(state.params, batch)

    for made, other, text in (
        (TENSOR, Axes(), r"embedding: .* have 12 of 24 .* over 1 ranks of tensor; give params and"),
        (Axes(), TENSOR, r"embedding: .* have 24 of 24 .* over 2 ranks of tensor; give params and"),
    ):
        with pytest.raises(ValueError, match=text):
            run(made, other)
    with pytest.raises(ValueError, match="kv_heads: 1 do not divide among 2 ranks of tensor; take fewer"):
        run(TENSOR, TENSOR, kv_heads=1)
    odd = {name: rows[:, : S - 1] for name, rows in batch.items()}
    run(TENSOR, TENSOR, odd)
    with pytest.raises(ValueError, match="sequences of 15 positions on a rank do not divide among 2 ranks of tensor"):
        run(SEQUENCE, SEQUENCE, odd)
    for name in batch:
        with pytest.raises(RuntimeError, match="a token or target is out of bounds: expected 0 to 23"):
            run(TENSOR, TENSOR, {**batch, name: batch[name] + 9})
    with pytest.raises(ValueError, match="it is over the ranks of tensor; give tensor=True as well"):
        Axes(sequence=True)
    for family, made_by in itertools.product((llama, gpt2), ("loss", "params")):
        with pytest.raises(NotImplementedError, match="not split over expert; those of mixtral are"):
            getattr(family, made_by)(next(iter(family.CONFIGS.values())), axes=EXPERT)
    own = dataclasses.replace(llama.model.DECODER, splits=())
    with pytest.raises(NotImplementedError, match=r"not split over tensor; those of all models.FAMILIES are"):
        own.over(TENSOR)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_halves_with_and_without_masks(masked: bool) -> None:
    """Kernels of a GPU are given no mask where a part sees its whole past, those of the CPU are."""
    q, k, v = (torch.randn(2, 8, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    masks = attention.halves(8, None, None, q) if masked else (None, None)
    assert not masked or masks[1] is not None
    found = attention.over_context(q, k, v, masks)
    torch.testing.assert_close(found, attention.attend(q, k, v, attention.Positions(), None), rtol=0, atol=1e-14)


INFERENCE = {
    "tensor": Case({"tensor": 2}, SEQUENCE),
    "gpt2": Case({"tensor": 2}, TENSOR, family="gpt2"),
    "context": Case({"context": 2}, CONTEXT),
    "mixtral": Case({"expert": 2}, EXPERT, {"experts": 4}, family="mixtral"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", by_name(INFERENCE))
def test_inference(_: Any, case: Case) -> None:
    """Scores of the next token, of targets, and token by token, outside of a step."""
    config = config_of(case)
    family = FAMILIES[case.family]
    axes = case.axes
    mesh = ya.mesh(device="cpu", **case.mesh)
    plain = ya.materialize(wide(family.params(config)))
    state = ya.init(wide(family.params(config, **axes.options)), mesh=mesh, precision=FLOAT64)
    over = family.over(axes)
    batch = batch_of(0)
    mine = axes.shard_batch(batch, mesh)
    want = axes.shard_batch(family.logits(config, plain, batch["tokens"]), mesh)
    close(over.logits(config, state.params, mine["tokens"]), want, "logits")
    scored = family.score(config, plain, batch["tokens"], batch["targets"])
    want_scored = optree.tree_map(lambda leaf: axes.shard_batch(leaf, mesh), tuple(scored))
    got = over.score(config, state.params, mine["tokens"], mine["targets"])
    torch.testing.assert_close(tuple(got), want_scored, atol=1e-6, rtol=0.0)  # in fp32
    if axes.context:
        with pytest.raises(NotImplementedError, match="decode: over context, keys and values would be on several"):
            decoding.decode(over, config, state.params, mine["tokens"], decoding.init_cache(over, config, 4, S), 0)
        return
    ranks = case.mesh.get("tensor", 1)
    tokens = mine["tokens"]
    cache = decoding.init_cache(over, config, len(tokens), S, torch.float64, ranks=ranks)
    first = decoding.decode(over, config, state.params, tokens[:, :-2], cache, 0)
    rest = [decoding.decode(over, config, state.params, tokens[:, at, None], cache, at) for at in (S - 2, S - 1)]
    close(torch.cat([first, *rest], 1), want, "token by token")
    if ranks > 1:
        with pytest.raises(ValueError, match=r"the cache has . heads of keys, .* over 2 ranks of .* pass init_cache r"):
            cache = decoding.init_cache(over, config, len(tokens), S, torch.float64)
            decoding.decode(over, config, state.params, tokens, cache, 0)
