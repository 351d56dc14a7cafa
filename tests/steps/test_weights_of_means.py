"""Weights of means that visits make: what depends on no parameter may be one, whether or not a visit keeps its graph.

In first steps, in later ones and across stages, against the plain loop; what depends is refused everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import bits, same
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, check_exact, compare, global_batch
from tests.harness.pool import on_ranks
from tests.harness.problems import IGNORED, TX, Batch, Head, Params, Problem, base_loss, base_params, block, embed
from tests.steps.staged.models import F64, TWO_STAGES

Loss = Callable[[Params, Batch], ya.Mean]


def counts(x: Tensor, targets: Tensor) -> Tensor:
    """[rows, length], floats: what each token counts."""
    return torch.where(targets == IGNORED, 0.0, 1 + targets / 10).to(x.dtype)


def weighed(w: Head, x: Tensor, targets: Tensor, each: Tensor) -> Tensor:
    losses = F.cross_entropy(((x * w.scale) @ w.out.T).flatten(0, 1), targets.clamp(0).flatten(), reduction="none")
    return (losses * each.flatten()).sum()


def embed_and_counts(table: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    x = embed(table, tokens)
    return x, counts(x, targets)


def hidden(params: Params, batch: Batch) -> Tensor:
    """What comes into the head."""
    return ya.scan(block, ya.apply(embed, params.embed, batch["tokens"]), params.layers)[0]


def with_weight(weight: Callable[[Head, Tensor, Tensor, Any], Tensor], name: str) -> Loss:
    """The loss whose head weighs tokens: `weight(w, x, each, bad)`."""

    def head(w: Head, x: Tensor, targets: Tensor, bad: Any) -> ya.Mean:
        each = counts(x, targets)
        return ya.Mean(weighed(w, x, targets, each), weight(w, x, each, bad))

    def loss(params: Params, batch: Any) -> ya.Mean:
        return ya.apply(head, params.head, hidden(params, batch), batch["targets"], batch.get("bad"))

    loss.__name__ = name
    return loss


in_the_head = with_weight(lambda w, x, each, bad: each.sum(), "in_the_head")


def of_an_argument(params: Params, batch: Batch) -> ya.Mean:
    """Made by the first visit, and added up by the last."""

    def head(w: Head, x: Tensor, targets: Tensor, each: Tensor) -> ya.Mean:
        return ya.Mean(weighed(w, x, targets, each), each.sum())

    x, each = ya.apply(embed_and_counts, params.embed, batch["tokens"], batch["targets"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(head, params.head, x, batch["targets"], each * 2)


def beside_visits(params: Params, batch: Batch) -> ya.Mean:
    x, each = ya.apply(embed_and_counts, params.embed, batch["tokens"], batch["targets"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.Mean(ya.apply(weighed, params.head, x, batch["targets"], each), each.sum())


def of_all_layers(params: Params, batch: Batch) -> ya.Mean:
    def layer(x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        return block(x, w)[0], x.detach().abs().sum()

    x, sizes = ya.scan(layer, ya.apply(embed, params.embed, batch["tokens"]), params.layers)
    return ya.Mean(ya.apply(weighed, params.head, x, batch["targets"], counts(x, batch["targets"])), sizes.sum())


ALLOWED: dict[str, Loss] = {loss.__name__: loss for loss in (in_the_head, of_an_argument, beside_visits, of_all_layers)}


@pytest.mark.sampled
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("schedule", ["zero3", "zero3-remat-all", "zero3-remat-every", "zero2-remat-all"])
def test_what_depends_on_no_parameter(mesh: Any, name: str, schedule: str) -> None:
    check_exact(mesh, Problem(base_params, ALLOWED[name]), layers=3, schedules=(schedule,))


@pytest.mark.sampled
@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["in_the_head", "of_an_argument"])
def test_across_stages(mesh: Any, name: str) -> None:
    loss = ALLOWED[name]
    state = ya.init(base_params(3), TX, mesh=mesh_of(stage=2), precision=F64, stages=TWO_STAGES)
    params = ya.unshard(state)
    batch = global_batch(mesh.size() // 2)
    for sharding in (ya.schedules.zero3(remat="all"), ya.schedules.zero2()):
        for order in (ya.schedules.gpipe, ya.schedules.zero_bubble):
            function = ya.value_and_grad(loss, schedule=order(sharding), microbatches=3)
            got = function(state.params, ya.shard_batch(batch, state.mesh))
            compare(got, ya.value_and_grad(loss)(params, batch), 1e-12, f"{name}, {order.__name__}")


# ---- what depends


of_the_hidden = with_weight(lambda w, x, each, bad: each.sum() + (x.sum() if bad else 0), "of_the_hidden")
of_the_weights = with_weight(lambda w, x, each, bad: each.sum() * (w.scale.sum() if bad else 1), "of_the_weights")


def of_what_passes(params: Params, batch: Any) -> ya.Mean:
    """Through all layers, untouched, and seen by nothing else."""

    def layer(carry: tuple[Tensor, Tensor], w: Any) -> tuple[tuple[Tensor, Tensor], None]:
        return (block(carry[0], w)[0], carry[1]), None

    def first(table: Tensor, tokens: Tensor, targets: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        x, each = embed_and_counts(table, tokens, targets)
        return x, each.sum() + (x.sum() if bad else 0)

    carry = ya.apply(first, params.embed, batch["tokens"], batch["targets"], batch["bad"])
    (x, weight), _ = ya.scan(layer, carry, params.layers)
    return ya.Mean(ya.apply(weighed, params.head, x, batch["targets"], counts(x, batch["targets"])), weight)


REFUSED: dict[str, Loss] = {loss.__name__: loss for loss in (of_the_hidden, of_the_weights, of_what_passes)}
TEXT = "the loss: the weight of a Mean depends on parameters; its gradient would be lost. Detach it"


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_is_refused(mesh: Any, name: str) -> None:
    """In a first step and in later ones; the state is as before, and trains on."""
    for remat in ("none", "all"):
        state = ya.init(base_params(3), TX, mesh=mesh)
        step = ya.train_step(REFUSED[name], TX, schedule=ya.schedules.zero3(remat=remat))
        good = {**batch_of(mesh.get_rank()), "bad": torch.tensor(0)}
        for _ in range(2):
            before = bits(state)
            with pytest.raises(ValueError, match=TEXT):
                step(state, {**good, "bad": torch.tensor(1)})
            assert same(bits(state), before)
            state, metrics = step(state, good)
            assert metrics["loss"].isfinite()


def test_what_a_frozen_unit_makes() -> None:
    params = base_params(3)
    state = ya.init(params._replace(embed=ya.frozen(params.embed)), TX, mesh=ya.mesh(device="cpu"))

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params.embed, batch["tokens"])
        return ya.Mean(base_loss(params, batch).total, x.abs().sum())

    step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(remat="all"))
    for _ in range(3):
        state, metrics = step(state, batch_of(0))
    assert metrics["loss"].isfinite()
    assert optree.tree_leaves(ya.unshard(state.params))
