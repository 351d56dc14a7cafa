"""Llamas under every feature alone, and under features that meet: several steps give the plain loop's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from models.llama.config import Config
from tests.harness.groups import by_the_backend
from tests.harness.marks import nightly
from tests.harness.oracle import joined, relative
from tests.harness.pool import on_ranks

V, STEPS = 37, 3  # the third step is the first that captures
TX = ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2, weight_decay=0.1))
Batch = Mapping[str, Tensor]
zero2 = ya.schedules.zero2
zero3 = ya.schedules.zero3
remat = ya.schedules.remat


class Features(NamedTuple):
    """What a run is made of; the defaults are the library's."""

    schedule: Callable[..., Any] = zero3
    options: Mapping[str, Any] = {}
    microbatches: int = 1
    chunks: int = 1
    unroll: int = 1
    layers: int = 3
    tied: bool = False
    pinned: bool = False
    frozen: bool = False
    compiled: bool = False
    exchange: bool = True
    precision: ya.Precision = ya.Precision()
    donate: bool = True


BF16 = ya.Precision(compute=torch.bfloat16)
ALL_BF16 = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)
ALONE = {
    "none": Features(),
    "prefetch 0": Features(options={"prefetch": 0}),
    "prefetch 3": Features(options={"prefetch": 3}, layers=5),
    "resident": Features(options={"resident": 2}, layers=5),
    "remat": Features(options={"remat": "all"}),
    "offload": Features(options={"remat": remat.offload()}),
    "update": Features(options={"update": True}),
    "zero2": Features(zero2),
    "microbatches": Features(microbatches=3),
    "defer": Features(options={"defer": True}, microbatches=3),
    "chunks": Features(chunks=3),
    "unroll": Features(unroll=2, layers=5),
    "tied": Features(tied=True),
    "pinned": Features(pinned=True),
    "frozen": Features(frozen=True),
    "one by one": Features(exchange=False),
    "bf16": Features(precision=BF16),
    "all bf16": Features(precision=ALL_BF16),
    "float64": Features(precision=ya.Precision(*[torch.float64] * 3)),
    "kept states": Features(donate=False),
}
TOGETHER = {
    "unroll, recomputed": Features(options={"remat": remat.every(2)}, unroll=2, layers=5),
    "unroll, one by one": Features(options={"prefetch": 2}, unroll=3, layers=7, exchange=False),
    "unroll, defer, pinned": Features(options={"defer": True, "update": True}, microbatches=2, unroll=2, pinned=True),
    "unroll, offload": Features(options={"remat": remat.offload(ahead=0)}, unroll=2),
    "chunks, recomputed, tied": Features(options={"remat": remat.first(2)}, chunks=2, tied=True, microbatches=2),
    "chunks, unroll, zero2": Features(zero2, {"update": True}, chunks=2, unroll=2, layers=4),
    "recomputed, update, microbatches": Features(options={"remat": "all", "update": True}, microbatches=2),
    "recomputed, bf16, update": Features(options={"remat": "all", "update": True}, precision=BF16),
    "recomputed, tied, frozen": Features(zero2, {"remat": "all"}, tied=True, frozen=True),
    "offload, update, tied": Features(options={"remat": remat.offload(), "update": True}, tied=True, microbatches=2),
    "resident, update, microbatches": Features(options={"resident": 2, "update": True}, microbatches=3, layers=5),
    "defer, bf16, tied": Features(options={"defer": True}, microbatches=2, precision=BF16, tied=True),
    "all bf16, unroll, defer": Features(options={"defer": True}, microbatches=2, unroll=2, precision=ALL_BF16),
    "frozen, unroll, resident": Features(options={"resident": 1}, frozen=True, unroll=2, pinned=True),
    "kept states, update": Features(options={"update": True}, donate=False, microbatches=2),
}
COMPILED = {
    "compiled, unroll": Features(compiled=True, unroll=2, microbatches=2),
    "compiled, recomputed, update, chunks": Features(
        options={"remat": "all", "update": True}, compiled=True, chunks=2, layers=2
    ),
    "compiled, offload, bf16": Features(options={"remat": remat.offload()}, compiled=True, precision=BF16),
}
CASES = ALONE | TOGETHER | COMPILED


def model(features: Features) -> tuple[Config, llama.Llama]:
    """Sizes that nothing divides, and abstract parameters."""
    sizes = {"vocab": V, "embed": 12, "ffn": 19, "heads": 3, "kv_heads": 1, "head_dim": 4, "max_length": 8}
    config = Config(layers=features.layers, tied=features.tied, **sizes)
    params = llama.params(config, pin_norms=features.pinned)
    if features.frozen:
        names = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
        some = {name: ya.frozen(w) if name in names else w for name, w in params.layers.tree.items()}
        params = params._replace(layers=ya.Stacked(some), head=ya.frozen(params.head))
    return config, params


def loss_of(config: Config, features: Features) -> Callable[[llama.Llama, Batch], ya.Mean]:
    """`llama.loss`, with a block that may be compiled, and a head whose gradient is formed in pieces."""
    block: Any = llama.block(config)
    block = torch.compile(block, backend="aot_eager") if features.compiled else block

    def last(weights: Any, x: Tensor, targets: Tensor) -> ya.Mean:
        own, matrix = (weights[0], weights[1]["weight"]) if config.tied else (weights, weights["lm_head.weight"])
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], own["model.norm.weight"], config.norm_eps)
        return ya.Mean(ya.linear_cross_entropy(x, matrix, targets, chunk=4), (targets != -100).sum())

    layer = ya.chunk(block, features.chunks, in_axes=(0, None))
    head = ya.chunk(last, features.chunks, in_axes=(None, 0, 0))

    def loss(params: llama.Llama, batch: Batch) -> ya.Mean:
        x = ya.apply(llama.embed, params.embed, batch["tokens"])
        x, _ = ya.scan(layer, x, params.layers, unroll=features.unroll)
        return ya.apply(head, llama.head_unit(config, params), x, batch["targets"])

    return loss


def batch_of(rank: int, step: int, rows: int) -> Batch:
    """[rows, 6] tokens and targets, of which more are masked on later ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = torch.randint(0, V, (2, rows, 6), generator=generator)
    masked = torch.rand(rows, 6, generator=generator) < 0.2 + 0.1 * rank
    return {"tokens": tokens, "targets": targets.masked_fill(masked, -100)}


def follows_the_plain_loop(mesh: Any, name: str) -> None:
    """Metrics of every step, gradients and evaluations between them, parameters in the end. Gradients are looked at
    last: later steps must not write into their memory."""
    features = CASES[name]
    ranks = mesh.size()
    rank = mesh.get_rank()
    low = features.precision.compute == torch.bfloat16
    rows = 2 * features.chunks * features.microbatches
    config, abstract = model(features)
    loss, plain_loss = loss_of(config, features), loss_of(config, Features())

    def oracle_loss(params: llama.Llama, batch: Batch) -> ya.Mean:
        return plain_loss(optree.tree_map(Tensor.bfloat16, params) if low else params, batch)

    state = ya.init(abstract, TX, mesh=mesh, precision=features.precision)
    oracle = ya.PlainState.create(abstract, TX)
    options = {"microbatches": features.microbatches}
    step = ya.train_step(loss, TX, schedule=features.schedule(**features.options), donate=features.donate, **options)
    shown = {key: value for key, value in features.options.items() if key != "update"}
    both = ya.value_and_grad(loss, schedule=features.schedule(**shown), **options)
    plain_step = ya.train_step(oracle_loss, TX)
    plain_both = ya.value_and_grad(oracle_loss)
    evaluate = ya.eval_step(loss)
    tolerance = 2e-2 if low else 1e-5
    kept = []

    for number in range(STEPS):
        batches = [batch_of(r, number, rows) for r in range(ranks)]
        own = batches[rank]
        whole = joined(batches)
        if number % 2:
            kept.append((both(state.params, own)[1], plain_both(oracle.params, whole)[1]))
        at = evaluate(state, own)["loss"] if number % 2 == 0 else None
        state, got = step(state, own)
        oracle, expected = plain_step(oracle, whole)
        if at is not None:
            assert relative(at.float(), expected["loss"].float()) <= tolerance, (name, number, at, expected)
        for key in ("loss", "grad_norm"):
            assert relative(got[key].float(), expected[key].float()) <= tolerance, (name, number, key, got, expected)

    for sharded, whole_grads in kept:
        for a, b in zip(leaves_of(ya.unshard(sharded)), leaves_of(whole_grads), strict=True):
            assert relative(a.float(), b.float()) <= (0.1 if low else 5e-5), (name, "gradients", tuple(a.shape))
    for a, b in zip(leaves_of(ya.unshard(state)), leaves_of(oracle.params), strict=True):
        assert float((a - b).abs().max()) <= (5e-2 if low else 2e-5), (name, "parameters", tuple(a.shape))


def leaves_of(tree: Any) -> list[Tensor]:
    return optree.tree_leaves(ya.params.without_markers(tree))


def all_of(mesh: Any, names: list[str]) -> None:
    for name in names:
        with contextlib.nullcontext() if CASES[name].exchange else by_the_backend():
            follows_the_plain_loop(mesh, name)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "names"),
    [
        *((world, list(ALONE)[world - 1 :: 2]) for world in (1, 2)),
        *(nightly(world, list(ALONE)) for world in (1, 2)),
    ],
    ids=["1-some", "2-others", "1-all", "2-all"],
)
def test_every_feature_alone(mesh: Any, names: list[str]) -> None:
    all_of(mesh, names)


ON_THREE = ["unroll, defer, pinned", "unroll, one by one", "frozen, unroll, resident", "all bf16, unroll, defer"]
"""What is cut unevenly, and what crosses several ranks as one."""


@on_ranks()
@pytest.mark.parametrize(
    ("world", "names"),
    [
        nightly(2, [name for name in TOGETHER if name not in ON_THREE]),
        (3, ON_THREE),
        *(nightly(world, list(TOGETHER)) for world in (1, 2)),
    ],
    ids=["2-others", "3-some", "1-all", "2-all"],
)
def test_features_together(mesh: Any, names: list[str]) -> None:
    all_of(mesh, names)


@on_ranks(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(mesh: Any, name: str) -> None:
    """By "aot_eager": what is traced, and what is kept, is a compiler's, and no C++ is compiled."""
    all_of(mesh, [name])
