"""What a loss does between visits, on tensors that are elsewhere on most stages: writes in place, questions about
values, and visits that are not those that were traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.groups import SOON, breakable_stages, outcome
from tests.harness.marks import nightly
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, check_steps
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import Batch, E, Params, base_params, block, embed, head, with_ends
from tests.steps.staged.models import F64, TWO_STAGES

TX = ya.optim.adamw(1e-2)


# ---- writes in place


def added(x: Tensor) -> Tensor:
    return x.add_(1.0)


def masked(x: Tensor) -> Tensor:
    x[x > 0.5] = 0.25
    return x


def scaled(x: Tensor) -> Tensor:
    x *= torch.arange(1.0, 1.0 + x.shape[-1], dtype=x.dtype)
    return x


def turned(x: Tensor) -> Tensor:
    """Changes the shape of the tensor itself."""
    x.unsqueeze_(0)
    return x[0]


WRITES: dict[str, Callable[[Tensor], Tensor]] = {of.__name__: of for of in (added, masked, scaled, turned)}


def writing(name: str, first: bool) -> Callable[[Params, Batch], ya.Mean]:
    """first: into what the first stage has made, else into what the last has."""
    write = WRITES[name]

    @with_ends
    def loss(params: Params, x: Tensor) -> Tensor:
        x = write(x) if first else x
        x, _ = ya.scan(block, x, params.layers)
        x = x if first else write(x)
        return x

    return loss


@on_ranks(2)
@pytest.mark.sampled
@pytest.mark.parametrize(("name", "first"), [(name, first) for name in WRITES for first in (True, False)])
def test_writes_in_place_are_exact(_: Any, name: str, first: bool) -> None:
    """One rank's part."""
    loss = writing(name, first)
    state = ya.init(base_params(3), TX, mesh=mesh_of(stage=2, shard=1), precision=F64, stages=TWO_STAGES)
    oracle = ya.PlainState.create(ya.unshard(state), TX)
    step, plain = (ya.train_step(loss, TX, microbatches=2) for _ in range(2))
    batches = [(batch_of(0, rows=4, seed=number),) * 2 for number in range(2)]
    check_steps((step, state), (plain, oracle), batches, 1e-12)


# ---- tensors of the loss's own


def remembering(used: str) -> Callable[[Params, Batch], ya.Mean]:
    """A loss with a queue of its own, of means of what the embedding gives; what it uses there, earlier calls wrote."""
    queue = torch.zeros(3, E, dtype=torch.float64)

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params.embed, batch["tokens"])
        y, _ = ya.scan(block, x, params.layers)
        mean = queue.mean(0)
        given = mean if used == "in a visit" else mean.new_zeros(E)
        ending = lambda w, y, more, targets: head(w, y + more, targets)  # noqa: E731
        total, weight = ya.apply(ending, params.head, y, given, batch["targets"])
        if used == "beside visits":
            total = total * (1 + mean.sum())
        with torch.no_grad():
            queue[0] = x.mean((0, 1))
            queue.copy_(queue.roll(1, 0))
        return ya.Mean(total, weight)

    return loss


@on_ranks(2)
@pytest.mark.parametrize("used", ["in a visit", "beside visits"])
def test_what_a_loss_keeps_is_of_the_stage_that_has_made_it(_: Any, used: str) -> None:
    """It travels to a visit; beside visits it would be as it was in the beginning, on the stage that makes the loss."""
    state = ya.init(base_params(3), TX, mesh=mesh_of(stage=2, shard=1), precision=F64, stages=TWO_STAGES)
    oracle = ya.PlainState.create(ya.unshard(state), TX)
    step, plain = (ya.train_step(remembering(used), TX, microbatches=2) for _ in range(2))
    batches = [(batch_of(0, rows=4, seed=number),) * 2 for number in range(3)]
    if used == "in a visit":
        check_steps((step, state), (plain, oracle), batches, 1e-12)
        return
    with pytest.raises(ValueError, match=r"the loss is made of what segments \[0, 1\] have made"):
        step(state, batches[0][0])


# ---- from the second step on, something else


class Other:
    """What the loss does in the step that is looked at. A loss finds it where all ranks have it."""

    now = False


@with_ends
def as_item(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(block, x, params.layers)
    factor = x.detach().mean().item() if Other.now else 1.0
    return x * factor


@with_ends
def as_numpy(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(block, x, params.layers)
    if Other.now:
        x.detach().numpy()
    return x


def one_less(params: Params, batch: Batch) -> ya.Mean:
    """The head is visited twice; then the first of these is left out, and another one is at the end."""
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    if not Other.now:
        x, _ = ya.apply(lambda w, x: (x * w.scale, 3), params.head, x)
    mean: ya.Mean = ya.apply(head, params.head, x, batch["targets"])
    return mean if not Other.now else ya.Mean(mean.total + ya.apply(lambda w: w.scale.sum(), params.head), mean.weight)


@with_ends
def no_pair(params: Params, x: Tensor) -> Tensor:
    """A visit is replaced by one of the same unit, which gives a tensor."""
    x, _ = ya.scan(block, x, params.layers)
    if Other.now:
        x = ya.apply(lambda w, x: x * w.scale, params.head, x) * 2.0
    else:
        x, _ = ya.apply(lambda w, x: (x * w.scale, 3), params.head, x)
    return x


def rest(params: Params, x: Tensor, batch: Batch) -> ya.Mean:
    """What comes after the embedding."""
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(head, params.head, x, batch["targets"])


def another_block(params: Params, batch: Batch) -> ya.Mean:
    """One block of the embedding for another, of two outputs."""
    if Other.now:
        x, y = ya.apply(lambda w, tokens: (embed(w, tokens), w.sum()), params.embed, batch["tokens"])
        x = x + y
    else:
        x = ya.apply(embed, params.embed, batch["tokens"])
    return rest(params, x, batch)


def fewer_tokens(params: Params, batch: Batch) -> ya.Mean:
    tokens = batch["tokens"][:, :1] if Other.now else batch["tokens"]
    x = ya.apply(embed, params.embed, tokens)
    return rest(params, x.expand(*batch["tokens"].shape, x.shape[-1]), batch)


def smaller(params: Params, batch: Batch) -> ya.Mean:
    """What leaves the first stage is of another shape, which would fit by broadcasting."""
    x = ya.apply(lambda w, tokens: embed(w, tokens[:, :1] if Other.now else tokens), params.embed, batch["tokens"])
    return rest(params, x, batch)


def without_mask(params: Params, batch: Batch) -> ya.Mean:
    """As transformers' models, which have no mask where nothing is padded."""
    mask = None if Other.now else torch.ones(batch["tokens"].shape)
    x = ya.apply(lambda w, tokens, mask: embed(w, tokens), params.embed, batch["tokens"], mask)
    return rest(params, x, batch)


LOSSES = {
    of.__name__: of for of in (as_item, as_numpy, one_less, no_pair, another_block, fewer_tokens, smaller, without_mask)
}


def said(_: Any, name: str) -> str:
    """How the second step of this rank ends."""
    Other.now = False
    loss = LOSSES[name]
    state = ya.init(base_params(3), TX, mesh=breakable_stages(2), stages=TWO_STAGES)
    step = ya.train_step(loss, TX, microbatches=2)
    state, _ = step(state, batch_of(0, rows=4))
    Other.now = True
    return outcome(lambda: step(state, batch_of(0, rows=4)), SOON)


VALUES = r"RuntimeError: the loss, called for forward of segment 0 .*, depends on the values of tensors \(.*: ask for"
GIVEN, RETURNS = (
    r"it is given tensors of other shapes or dtypes \(.*, where there were .*\)",
    "it returns other shapes, or another tree",
)
RAISED = r"TypeError: can't multiply sequence by non-int of type 'float'"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("as_item", VALUES),
        nightly("as_numpy", VALUES),
        nightly("one_less", rf"OrderChanged: head \(visit 4\): {GIVEN} than when the step was traced. A loss"),
        ("without_mask", rf"OrderChanged: embed \(visit 0\): {GIVEN} \(what some microbatches lack, as transformers'"),
        nightly("no_pair", RAISED),
        nightly("another_block", rf"OrderChanged: embed \(visit 0\): {RETURNS} than when the step was traced"),
        nightly("fewer_tokens", rf"OrderChanged: embed \(visit 0\): {GIVEN} than when the step was traced"),
        nightly("smaller", rf"OrderChanged: embed \(visit 0\): {RETURNS} than when the step was traced"),
    ],
)
def test_said(pools: Pools, name: str, message: str) -> None:
    """By the first stage; the other waits for it."""
    found, other = pools[2].run(said, name)
    assert re.search(message, found), found
    assert "CommunicationError: rank 1: receive of segment 0 -> 1 (microbatch 0) from stage 0" in other, other
