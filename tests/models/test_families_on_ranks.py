"""Gradients of every family on two ranks against the plain loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import pytest
import torch

import models
import yafsdp_fn as ya
from models import gpt2, llama, mistral, mixtral, qwen3
from tests.harness.abstract import batch_of
from tests.harness.marks import by_day
from tests.harness.oracle import by_autograd, compare, looped, whole
from tests.harness.pool import on_ranks
from tests.models.theirs import draw, gains_in_float32, with_targets

ODD = {"vocab": 61, "embed": 33, "ffn": 41, "layers": 3, "max_length": 64}  # divisible by no rank
HEADS = {**ODD, "heads": 3, "kv_heads": 1, "head_dim": 10}
SMALL = {
    "llama": llama.Config(**HEADS),
    "qwen3": qwen3.Config(**HEADS, tied=True),
    "mistral": mistral.Config(**HEADS, window=9),
    "gpt2": gpt2.Config(**ODD, heads=3),
    "mixtral": mixtral.Config(**HEADS, experts=5, chosen=2, router_loss=True, router_coef=0.3),
}


def check(mesh: Any, name: str, rows: tuple[int, ...] = (2, 2)) -> None:
    """One rank's part: gradients, in float64, of its rows and of microbatches of them, against the plain loop's."""
    config = SMALL[name]
    family = models.of(config)
    batch = with_targets(draw(4, 24, most=61)) | {"documents": (draw(4, 24, seed=2) > 90).cumsum(1)}
    batch["targets"][0, 2:20] = -100
    mine = {key: value.split(rows)[mesh.get_rank()] for key, value in batch.items()}
    plain = optree.tree_map(torch.Tensor.double, ya.materialize(family.params(config)))
    expected = ya.value_and_grad(family.loss(config))(plain, batch)
    for pin_norms, microbatches, chunks, remat in ((False, 1, 1, "all"), (True, 2, 1, "none"), (False, 1, 2, "none")):
        params = family.params(config, pin_norms=pin_norms)
        state = ya.init(params, mesh=mesh, precision=ya.Precision(torch.float64))
        loss = family.loss(config, chunks=chunks)
        schedule = ya.schedules.zero3(remat=remat)
        step = ya.value_and_grad(loss, schedule=schedule, microbatches=microbatches)
        step(state.params, mine)  # recorded; then as a program
        compare(step(state.params, mine), expected, 1e-12, name)


@on_ranks(2)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_on_two_ranks_are_those_of_the_plain_loop(mesh: Any, name: str) -> None:
    check(mesh, name)


@on_ranks(2)
@pytest.mark.parametrize("name", by_day(SMALL, "llama", "mixtral"))
def test_a_rank_may_have_no_rows(mesh: Any, name: str) -> None:
    check(mesh, name, (4, 0))


@on_ranks(2)
def test_what_the_router_tells_is_of_the_whole_batch(mesh: Any) -> None:
    """Each layer's loads over an even share: their mean is one; and the router's loss, whose least is `chosen`."""
    config = SMALL["mixtral"]
    batch = with_targets(draw(4, 24, most=61))
    state = ya.init(mixtral.params(config), ya.optim.sgd(0.0), mesh=mesh, seed=0)
    step = ya.train_step(mixtral.loss(config, has_aux=True), ya.optim.sgd(0.0), has_aux=True, microbatches=2)
    _, metrics = step(state, ya.shard_batch(batch, mesh))
    loss = metrics["aux"]["router_loss"].item()
    load = metrics["aux"]["expert_load"]
    assert load.shape == (3, 5)
    torch.testing.assert_close(load.mean(1), torch.ones(3))
    params = ya.materialize(mixtral.params(config), seed=0)
    _, aux = mixtral.loss(config, has_aux=True)(params, batch)
    torch.testing.assert_close(load, aux["expert_load"].total / aux["expert_load"].weight)
    assert loss == pytest.approx((aux["router_loss"].total / aux["router_loss"].weight).item(), rel=1e-6)
    assert config.chosen <= loss < config.experts
    assert load.std() > 0.05
    bare = mixtral.loss(dataclasses.replace(config, router_loss=False))(params, batch)
    with_router = mixtral.loss(config)(params, batch)
    part = config.router_coef * aux["router_loss"].total
    torch.testing.assert_close(with_router.total, bare.total + part, atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_of_packed_documents(name: str) -> None:
    """Traces on fake tensors see no values, so experts are taken to be alike."""
    config = SMALL[name]
    family = models.of(config)
    batch = batch_of(2, 24)
    batch["documents"] = batch["tokens"]
    trace = ya.planner.trace(family.loss(config), family.params(config), batch, ranks=2, tx=ya.optim.adamw(1e-3))
    # a multiplication and an addition for each weight that a token meets, but those of norms and biases; a mask saves
    # no pair of a query and a key
    assert 0.93 < sum(visit.cost.flops for visit in trace.visits) / (2 * 48 * config.multiplied) <= 1.0
    assert sum(visit.cost.attention_flops for visit in trace.visits) == 3 * 4 * 48 * 24 * config.attended


def flat(tree: Any) -> dict[str, Any]:
    bare = whole(tree)
    return dict(zip(optree.tree_leaves(ya.params.leaf_names(bare)), optree.tree_leaves(bare), strict=True))


@on_ranks(1, 2)
def test_a_mixtral_in_bf16_with_routers_and_gains_in_float32(mesh: Any) -> None:
    """One rank's part: gradients of a Mixtral in bfloat16 whose routers and gains are in float32, summed in float64."""
    F32 = torch.float32
    F64 = torch.float64
    config = dataclasses.replace(SMALL["mixtral"], router_loss=False)
    abstract = gains_in_float32(mixtral.params(config, router=F32))
    leaves = {path: leaf for path, leaf in flat(abstract).items() if leaf.compute is not None}
    assert len(leaves) == 4
    assert any(path.endswith(mixtral.GATE) for path in leaves)
    dtypes = optree.tree_map(lambda leaf: leaf.compute or torch.bfloat16, whole(abstract))
    plain = optree.tree_map(torch.Tensor.double, ya.materialize(abstract))
    loss = mixtral.loss(config)

    def cast(params: Any, batch: Any) -> Any:
        return loss(optree.tree_map(torch.Tensor.to, params, dtypes), batch)

    batches = [with_targets(draw(2, 24, most=61, seed=rank)) for rank in range(mesh.size())]
    half = ya.Precision(F64, compute=torch.bfloat16, reduce=F64)
    state = ya.init(abstract, mesh=mesh, seed=0, precision=half)
    with by_autograd():  # a slot sums up rows of the embedding in float64, autograd in bfloat16
        value, grads = looped(cast, plain, batches)
        for remat in ("every:2", "none"):
            function = ya.value_and_grad(loss, schedule=ya.schedules.zero3(remat=remat))
            found, got = function(state.params, batches[mesh.get_rank()])
            compare(found.float(), value, 1e-6, "value")
            compare(got, grads, 1e-12, "gradients")
    without = ya.init(mixtral.params(config), mesh=mesh, seed=0, precision=half)
    other = flat(ya.value_and_grad(loss)(without.params, batches[mesh.get_rank()])[1])
    rounded = [path for path in leaves if not torch.equal(other[path], flat(got)[path])]
    assert len(rounded) == len(leaves)
