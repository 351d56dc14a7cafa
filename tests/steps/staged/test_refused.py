"""Losses that no cut into stages can run: refused by name, on every rank alike, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.groups import breakable_stages, outcome
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from tests.harness.problems import Batch, Params, base_params, block, block_with_y, embed, head, with_ends
from tests.steps.staged.models import TWO_STAGES

TX = ya.optim.adamw(1e-3)


@with_ends
def sums_all_layers(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    x, ys = ya.scan(block_with_y, x, params.layers)
    return x, ys.sum()


@with_ends
def mixes(params: Params, x: Tensor) -> Tensor:
    y, _ = ya.scan(block, x, params.layers)
    return x + y


def regularised(params: Params, batch: Batch) -> ya.Mean:
    total, weight = plain(params, batch)
    return ya.Mean(total + sum(leaf.square().sum() for leaf in params.head.leaves), weight)


def looks(params: Params, batch: Batch) -> ya.Mean:
    with torch.no_grad():
        ya.apply(embed, params.embed, batch["tokens"])
    return plain(params, batch)


@with_ends
def writes(params: Params, x: Tensor) -> Tensor:
    x = x * 1.0
    y, _ = ya.scan(block, x, params.layers)
    with torch.no_grad():
        x.add_(1.0)
    return y


def detached(params: Params, batch: Batch) -> ya.Mean:
    total, weight = plain(params, batch)
    return ya.Mean(total.detach(), weight)


def detached_and_marked(params: Params, batch: Batch) -> ya.Mean:
    total, weight = plain(params, batch)
    return ya.Mean(total.detach().requires_grad_(), weight)


@with_ends
def asks(params: Params, x: Tensor) -> Tensor:
    if x.sum() > 1e9:
        x = x * 2
    x, _ = ya.scan(block, x, params.layers)
    return x


def odd_aux(params: Params, batch: Batch) -> Any:
    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(head, params.head, x, batch["targets"]), {"hidden": x.detach()}


def part_of_a_stack(params: Params, batch: Batch) -> ya.Mean:
    return plain(params._replace(layers=optree.tree_map(lambda leaf: leaf[:1], params.layers)), batch)


@with_ends
def plain(params: Params, x: Tensor) -> Any:
    return ya.scan(block, x, params.layers)[0]


# ---- what a recorded call refuses where there are no stages


def in_place(leaf: Tensor) -> None:
    leaf.mul_(0.5)


def by_data(leaf: Tensor) -> None:
    leaf.data.mul_(0.5)


def replaced(leaf: Tensor) -> None:
    leaf.data = leaf.data * 0.5


def writes_leaves(write: Callable[[Tensor], None], params: Params, batch: Batch) -> ya.Mean:
    with torch.no_grad():
        write(params.layers.leaves[0])
    return plain(params, batch)


def writes_weights(write: Callable[[Tensor], None], params: Params, batch: Batch) -> ya.Mean:
    def writing(x: Tensor, w: Any) -> Any:
        write(w.up)
        return block(x, w)

    return with_ends(lambda params, x: ya.scan(writing, x, params.layers)[0])(params, batch)


def scaled(params: Params, batch: Batch) -> Tensor:
    total: Tensor = plain(params, batch).total
    return torch.amp.GradScaler("cpu").scale(total)


def reduced(params: Params, batch: Batch) -> Tensor:
    total: Tensor = plain(params, batch).total
    torch.distributed.all_reduce(total)
    return total


@with_ends
def reduced_in_a_block(params: Params, x: Tensor) -> Any:
    def reducing(x: Tensor, w: Any) -> Any:
        x, _ = block(x, w)
        torch.distributed.all_reduce(x)
        return x, None

    return ya.scan(reducing, x, params.layers)[0]


SCALE = torch.nn.Parameter(torch.ones(()))


def scaled_by_a_parameter(params: Params, batch: Batch) -> ya.Mean:
    total, weight = plain(params, batch)
    return ya.Mean(total * SCALE, weight)


@with_ends
def parameter_before_a_visit(params: Params, x: Tensor) -> Any:
    return ya.scan(block, x * SCALE, params.layers)[0]


def lets_a_weight_out(params: Params, batch: Batch) -> Any:
    kept = []

    def keeping(table: Tensor, tokens: Tensor) -> Tensor:
        kept.append(table)
        return embed(table, tokens)

    x = ya.apply(keeping, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(head, params.head, x + kept[0].mean(), batch["targets"])


LEAF_WRITTEN = "RuntimeError: the loss writes into the leaves of its parameters in place"
WEIGHT_WRITTEN = "RuntimeError: layers[0]: the block writes into its weights in place"
NOT_BY_TORCH = "RuntimeError: the loss, or a block, gives a tensor with a gradient to a collective of torch.distributed"
OF_A_MODULE = "ValueError: the loss depends on a torch.nn.Parameter () that is none of its arguments"


SCHEDULES: dict[str, Any] = {
    "zero2": ya.schedules.zero2,
    "gpipe over gpipe": lambda: ya.schedules.gpipe(ya.schedules.gpipe()),
}


def said(_: Any, loss: Callable[..., Any], options: dict[str, Any]) -> str:
    if "schedule" in options:
        options = {"schedule": SCHEDULES[options["schedule"]]()}
    state = ya.init(base_params(3), TX, mesh=mesh_of(stage=2, shard=1), stages=TWO_STAGES)
    try:
        ya.train_step(loss, TX, **options)(state, batch_of(0))
    except (RuntimeError, ValueError, TypeError) as error:
        state, _metrics = ya.train_step(plain, TX)(state, batch_of(0))  # all ranks failed alike: the state is good
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (sums_all_layers, {}, "ValueError: the loss is made of what segments [0, 1] have made"),
        (mixes, {}, "ValueError: head (visit 4): argument 0 mixes, between visits, what segments [0, 1] have made"),
        (regularised, {}, "RuntimeError: the loss reads sharded leaves beside its visits"),
        (looks, {}, "RuntimeError: embed: a visit under no_grad inside of a step across stages"),
        (writes, {}, "RuntimeError: layers[0]: an argument is written in place after the visit took it"),
        (detached, {}, "ValueError: the loss does not depend on the differentiated arguments"),
        (detached_and_marked, {}, "ValueError: the loss does not depend on the differentiated arguments"),
        (part_of_a_stack, {}, "ValueError: scan: local shards of layers are torch.float32 (1,"),
        (asks, {}, "RuntimeError: the loss depends on the values of tensors"),
        (odd_aux, {"has_aux": True}, "ValueError: aux: a leaf is made by visits that only one stage computes"),
        (partial(writes_leaves, in_place), {}, LEAF_WRITTEN),
        (partial(writes_leaves, by_data), {}, LEAF_WRITTEN),
        (partial(writes_weights, by_data), {}, WEIGHT_WRITTEN),
        (partial(writes_weights, replaced), {}, WEIGHT_WRITTEN),
        (scaled, {}, "RuntimeError: a torch.amp.GradScaler scales the loss"),
        (reduced, {}, NOT_BY_TORCH),
        (reduced_in_a_block, {}, NOT_BY_TORCH),
        (lets_a_weight_out, {}, "ValueError: embed: the block keeps a weight (37, 7), and the loss uses it afterwards"),
        (scaled_by_a_parameter, {}, OF_A_MODULE),
        (parameter_before_a_visit, {}, OF_A_MODULE),
        (
            plain,
            {"schedule": "zero2"},
            "TypeError: the mesh has 2 stages, and the schedule returned a Program of 1",
        ),
        (
            plain,
            {"schedule": "gpipe over gpipe"},
            "ValueError: this schedule is for pipeline stages, and the step has none",
        ),
    ],
)
def test_refused(mesh: Any, loss: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    text = said(mesh, loss, options)
    assert message in text, text


@on_ranks(2)
@pytest.mark.parametrize("per_stage", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_may_write_to_its_batch(_: Any, per_stage: int, microbatches: int) -> None:
    """Each segment calls the loss anew, and forwards of later microbatches come before a backward."""
    trace = ya.planner.trace(plain, base_params(4), batch_of(0))
    stages = ya.schedules.assign(trace, 2, per_stage=per_stage)
    order = ya.schedules.one_f_one_b if per_stage == 1 else ya.schedules.interleaved
    mesh = mesh_of(stage=2, shard=1)
    found = []
    for write in (True, False):

        def loss(params: Params, batch: Batch, write: bool = write) -> Any:
            if not write:
                return plain(params, batch)
            batch["targets"].sub_(1)
            return plain(params, {"tokens": batch.pop("tokens"), "targets": batch["targets"] + 1})

        state = ya.init(base_params(4), TX, mesh=mesh, stages=stages)
        step = ya.train_step(loss, TX, schedule=order(ya.schedules.zero3()), microbatches=microbatches)
        for rank in range(2):
            state, metrics = step(state, batch_of(rank, rows=4))
        found.append(metrics["loss"].item())
    assert found[0] == found[1]


@on_ranks(2)
def test_aux_of_other_shapes_than_in_the_trace_is_refused(_: Any) -> None:
    """Other stages have made zeros for it. One stage says so, and the others are told."""
    state = ya.init(base_params(3), TX, mesh=breakable_stages(2), stages=TWO_STAGES)
    size = 2
    fun = lambda params, batch: (plain(params, batch), {"some": ya.Sum(torch.ones(size))})  # noqa: E731
    step = ya.train_step(fun, TX, has_aux=True)
    state, _metrics = step(state, batch_of(0))
    size = 3
    text = outcome(lambda: step(state, batch_of(0)))
    assert "OrderChanged: aux: microbatch 0 returned the shapes [Sum(value=(3,))], and [Sum(value=(2,))] when" in text


@on_ranks(2)
def test_a_number_that_a_visit_returns_and_that_changes_is_refused(_: Any) -> None:
    """Other stages have the number of the trace. A visit's stage says so, and the others are told."""
    state = ya.init(base_params(3), TX, mesh=breakable_stages(2), stages=TWO_STAGES)
    factor = 2.0

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x, number = ya.apply(lambda w, tokens: (embed(w, tokens), factor), params.embed, batch["tokens"])
        x, _ = ya.scan(block, x, params.layers)
        total, weight = ya.apply(head, params.head, x, batch["targets"])
        return ya.Mean(total * number, weight)

    once = ya.eval_step(plain)(state, batch_of(0))["loss"]
    step = ya.train_step(loss, TX)
    state, metrics = step(state, batch_of(0))
    torch.testing.assert_close(metrics["loss"], 2 * once)
    factor = 3.0
    text = outcome(lambda: step(state, batch_of(0)))
    assert "OrderChanged: embed (visit 0): it returns another number, beside its tensors, than when the" in text, text


@on_ranks(2)
def test_a_pipeline_of_another_step(_: Any) -> None:
    """A pipeline that was lowered for a batch of another shape."""
    state = ya.init(base_params(3), TX, mesh=mesh_of(stage=2, shard=1), stages=TWO_STAGES)
    schedule = ya.schedules.one_f_one_b(ya.schedules.zero2(update=True))
    lowered = ya.train_step(plain, TX, schedule=schedule).lower(state, batch_of(0))
    state, _metrics = ya.train_step(plain, TX, schedule=lowered, skip_nonfinite=False)(state, batch_of(0))
    with pytest.raises(ValueError) as refused:
        ya.train_step(plain, TX, schedule=lowered)(state, batch_of(0, rows=4))
    said = str(refused.value)
    assert said.startswith("the program does not fit: split")
