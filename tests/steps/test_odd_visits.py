"""Blocks, carries and trees of unusual form, as exact as the usual ones: in float64, to 1e-13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, check_exact, compare, global_batch, looped, noting, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import (
    TX,
    Batch,
    E,
    Head,
    Layer,
    Loss,
    Params,
    Problem,
    V,
    base_loss,
    base_params,
    block,
    block_with_y,
    embed,
    head,
    layer,
    masked_loss,
    param,
    with_ends,
    with_ends_and_batch,
)

FEW = ("zero3", "zero3-remat-all", "zero2")
WORLDS = on_ranks(1, 2)


# ---- trees


def nested_params(layers: int) -> dict[str, Any]:
    """Stacks and units at several depths; dictionaries and lists on the way."""
    return {
        "input": {"table": param(V, E), "stacks": [ya.Stacked(layer(layers)), ya.Stacked({"only": layer(2, f=3)})]},
        "output": [param(E), {"out": param(V, E), "inner": ya.Unit(layer(f=4))}],
    }


def nested_loss(params: dict[str, Any], batch: Batch) -> ya.Mean:
    x = ya.apply(embed, params["input"]["table"], batch["tokens"])
    x, _ = ya.scan(block, x, params["input"]["stacks"][0])
    x, _ = ya.scan(lambda x, w: block(x, w["only"]), x, params["input"]["stacks"][1])
    scale, rest = params["output"]
    x = ya.apply(lambda w, x: block(x, w)[0], rest["inner"], x)
    return ya.apply(lambda w, x, targets: head(Head(*w), x, targets), (scale, rest["out"]), x, batch["targets"])


class Flat(NamedTuple):
    """A tree without stacks: each leaf is a unit, some of them smaller than the number of ranks; one is empty."""

    table: Any
    bias: Any
    scalar: Any
    empty: Any


def flat_params(layers: int) -> Flat:
    return Flat(param(V, E), param(E), param(), param(0, E))


def flat_block(w: Flat, tokens: Tensor, targets: Tensor) -> ya.Mean:
    x = torch.tanh(w.table[tokens] + w.bias) + w.empty.sum()
    return masked_loss(x @ w.table.T * w.scalar, targets)


def flat_loss(params: Flat, batch: Batch) -> ya.Mean:
    return ya.apply(flat_block, params, batch["tokens"], batch["targets"])


# ---- carries and outputs


def odd_block(carry: dict[str, Any], w: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Integers, what passes through, what has no gradient, one tensor in two places, no tensor at all."""
    x = block(carry["x"], w)[0]
    new = {"x": x, "count": carry["count"] + 1, "same": carry["same"], "sum": carry["sum"] + x.detach().mean() * 0}
    return new, {"x": x, "argmax": x.argmax(-1), "twice": x, "ones": torch.ones(2), "none": None}


def described(w: Head, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x * w.scale, {"text": "t", "n": 3, "index": x.argmax(), "mean": x.detach().mean()}


@with_ends
def odd_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    carry = {"x": x, "count": torch.tensor(0), "same": x, "sum": x.new_zeros(())}
    carry, ys = ya.scan(odd_block, carry, params.layers)
    assert ys["none"] is None
    assert not ys["argmax"].requires_grad
    assert not carry["count"].requires_grad
    x = carry["x"] + 0.5 * carry["same"] * carry["count"] + carry["sum"]
    x, told = ya.apply(described, params.head, x)
    assert (told["text"], told["n"], told["index"].dtype) == ("t", 3, torch.int64)
    extra = (ys["x"] * ys["twice"]).sum() * 1e-2 + ys["ones"].sum() * 0
    return x, extra + told["mean"]


def identity_block(x: Tensor, w: Layer) -> tuple[Tensor, Tensor]:
    return x, w.up.square().sum() * x.sum()


@with_ends
def identity_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """The carry comes out as the very tensor that went in."""
    x, ys = ya.scan(identity_block, x, params.layers)
    return x, 1e-2 * ys.sum()


@with_ends_and_batch
def recurrent_loss(params: Params, x: Tensor, batch: Batch) -> Any:
    """The first carry requires no grad; tokens come in through consts, an int tensor among them."""

    def step(h: Tensor, w: Layer, consts: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        tokens, x = consts
        return block(h, w)[0] + x * (tokens % 2).unsqueeze(-1), None

    return ya.scan(step, torch.zeros_like(x), params.layers, consts=(batch["tokens"], x))[0]


def shared_loss(params: Params, batch: Batch) -> ya.Mean:
    """One stack twice among the xs of a scan, one unit twice in an apply, one tensor as carry and as const."""

    def both(x: Tensor, w: tuple[Layer, Layer], start: Tensor) -> tuple[Tensor, None]:
        return block(block(x, w[0])[0], w[1])[0] + start, None

    x = ya.apply(embed, params.embed, batch["tokens"])
    x, _ = ya.scan(both, x, (params.layers, params.layers), consts=x)
    return ya.apply(lambda w, x, t: head(w[0], x * w[1].scale, t), (params.head, params.head), x, batch["targets"])


@with_ends
def unrolled_reverse_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    def numbered(x: Tensor, item: tuple[Layer, Tensor]) -> tuple[Tensor, Tensor]:
        w, number = item
        x = block(x, w)[0] * (1 + 0.01 * number)
        return x, x.sum() * number

    numbers = torch.arange(float(optree.tree_leaves(params.layers)[0].shape[0]))
    x, ys = ya.scan(numbered, x, (params.layers, numbers), reverse=True, unroll=2)
    return x, 1e-2 * (ys * numbers).sum()


def autocast_loss(params: Params, batch: Batch) -> ya.Mean:
    """A backward runs outside of this `with`: what it recomputes must not."""
    with torch.autocast("cpu", torch.bfloat16):
        return base_loss(params, batch)


@with_ends
def inplace_loss(params: Params, x: Tensor) -> Tensor:
    """Outputs of a visit are the loss's own, to be written to."""
    x += 1.0
    x, _ = ya.scan(block, x, params.layers)
    x.mul_(2.0)
    return x


@with_ends_and_batch
def unequal_loss(params: Params, x: Tensor, batch: Batch) -> Tensor:
    """Half of the rows use what the layers give, the others do not: on some rank perhaps none does."""
    y, _ = ya.scan(block, x, params.layers)
    use = (batch["tokens"][:, :1] % 2 == 0).unsqueeze(-1)
    return torch.where(use, y, x) if bool(use.any()) else x


# ---- parts of a stack


@with_ends
def parts_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first layers, every second one backwards, one twice in a visit; layer 3 never."""
    x, _ = ya.scan(block, x, params.layers, order=range(3))
    x, _ = ya.scan(block, x, params.layers, order=range(0, 5, 2), reverse=True)
    x, ys = ya.scan(block_with_y, x, params.layers, order=[1, 1, 2], unroll=2)
    return x, 1e-2 * ys.sum()


def all_pinned_params(layers: int) -> Params:
    return base_params(layers)._replace(more=ya.Stacked(ya.Pinned({"a": param(layers, E), "b": param(layers)})))


@with_ends
def all_pinned_loss(params: Params, x: Tensor) -> Tensor:
    """A stack of nothing but pinned leaves, alone and beside another one in a scan."""
    x, _ = ya.scan(lambda x, w: (torch.tanh(x * w["a"] + w["b"]), None), x, params.more, unroll=2)
    x, _ = ya.scan(lambda x, w: block(x + w[0]["a"], w[1]), x, (params.more, params.layers))
    return x


def loss_of_depth(depth: int) -> Loss:
    return with_ends(lambda params, x: ya.scan(block, x, params.layers, order=range(depth))[0])


@WORLDS
def test_a_depth_may_vary_from_step_to_step(mesh: Any) -> None:
    """A depth that varies from step to step: a step for each, on one state, and each is traced once."""
    tree, (batch, whole) = base_params(5), (batch_of(mesh.get_rank()), global_batch(mesh.size()))
    traces: list[Any] = []
    build = noting(ya.schedules.zero3(remat="all", resident=1, update=True), traces)
    steps = {depth: ya.train_step(loss_of_depth(depth), TX, schedule=build, microbatches=3) for depth in (1, 3, 5)}
    state = ya.init(tree, TX, mesh=mesh, precision=ya.Precision(torch.float64))
    alone = ya.PlainState.create(optree.tree_map(lambda leaf: leaf.to(torch.float64), plain(tree)), TX)
    for number, depth in enumerate((5, 1, 3, 1, 5, 5, 3)):
        state, metrics = steps[depth](state, batch)
        alone, expected = steps[depth](alone, whole)
        compare(metrics["loss"], expected["loss"], 1e-12, f"loss of step {number}, depth {depth}")
        compare(state.params, alone.params, 1e-9, f"step {number}, depth {depth}")
    assert [len(trace.visits) for trace in traces] == [7, 3, 5]
    assert [steps[depth].program(state).trace.visits for depth in (5, 1, 3)] == [trace.visits for trace in traces]


ODD = {
    "nested": Problem(nested_params, nested_loss),
    "flat": Problem(flat_params, flat_loss),
    "odd": Problem(base_params, odd_loss),
    "identity": Problem(base_params, identity_loss),
    "recurrent": Problem(base_params, recurrent_loss),
    "shared": Problem(base_params, shared_loss),
    "unrolled-reverse": Problem(base_params, unrolled_reverse_loss),
    "inplace": Problem(base_params, inplace_loss),
    "unequal": Problem(base_params, unequal_loss),
    "parts": Problem(base_params, parts_loss),
    "all pinned": Problem(all_pinned_params, all_pinned_loss),
}


@pytest.mark.sampled
@WORLDS
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("schedule", FEW)
def test_odd_visits(mesh: Any, name: str, schedule: str) -> None:
    check_exact(mesh, ODD[name], layers=5, schedules=(schedule,), dtype=torch.float64, bits=False)


def half(weight: Tensor) -> Tensor:
    return weight.detach() / 2


Function = Callable[[Tensor], Tensor]


def noted(function: Function) -> Function:
    """Keeps what it returns on its argument."""
    return lambda weight: vars(weight).setdefault("noted", function(weight))


def weakly_kept(function: Function) -> Function:
    kept = WeakTensorKeyDictionary()
    return lambda weight: kept.setdefault(weight, function(weight))


@WORLDS
@pytest.mark.parametrize("remat", ["none", "all"])
@pytest.mark.parametrize("keep", [noted, weakly_kept, functools.lru_cache])
def test_what_is_kept_for_a_weight_is_for_one_visit(mesh: Any, remat: str, keep: Any) -> None:
    """As an attribute, or in a cache. In the next step the weight is another one."""
    halved = keep(half)

    @with_ends
    def noted_loss(params: Params, x: Tensor) -> Tensor:
        def noting(x: Tensor, w: Layer) -> tuple[Tensor, None]:
            return block(x + (x @ halved(w.up).T).tanh().mean(-1, keepdim=True), w)

        return ya.scan(noting, x, params.layers)[0]

    step = ya.train_step(noted_loss, TX, schedule=ya.schedules.zero3(remat=remat))
    state = ya.init(base_params(3), TX, mesh=mesh, precision=ya.Precision(torch.float64))
    alone = ya.PlainState.create(optree.tree_map(lambda leaf: leaf.to(torch.float64), plain(base_params(3))), TX)
    for number in range(3):
        state, _ = step(state, batch_of(mesh.get_local_rank()))
        alone, _ = step(alone, global_batch(mesh.size()))
        compare(state.params, alone.params, 1e-9, f"step {number}")


@on_ranks(1)
def test_autocast_is_replayed(mesh: Any) -> None:
    """To the bit, on one rank; in float32, since it leaves float64 alone."""
    problem = Problem(base_params, autocast_loss)
    check_exact(mesh, problem, layers=3, schedules=FEW, microbatches=(1,), dtype=torch.float32)


# ---- ranks that differ in what they use


@with_ends_and_batch
def used_by_one(params: Params, x: Tensor, batch: Batch) -> Tensor:
    y, _ = ya.scan(block, x, params.layers)
    return y if batch["use"].all() else x


@on_ranks(2, 3)
def test_ranks_that_use_different_outputs(mesh: Any) -> None:
    """Only the last rank's loss depends on the layers; the others must still take part in their reductions."""
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    batches = [batch_of(r) | {"use": torch.full((3,), r == ranks - 1)} for r in range(ranks)]
    expected = looped(used_by_one, ya.params.without_markers(plain(base_params(3))), batches)
    state = ya.init(base_params(3), TX, mesh=mesh)
    for schedule in (ya.schedules.zero3(), ya.schedules.zero3(remat="all"), ya.schedules.zero2()):
        function = ya.value_and_grad(used_by_one, schedule=schedule)
        for _ in range(2):
            compare(function(state.params, batches[rank]), expected, 1e-5, "value and gradients")


# ---- what is differentiated


@on_ranks(1, 2, 3)
def test_parts_of_a_tree(mesh: Any) -> None:
    """Some of the parameters, beside others that stay fixed; plain tensors beside sharded ones."""
    ranks, batch = mesh.size(), batch_of(mesh.get_local_rank())
    state = ya.init(base_params(3), TX, mesh=mesh)
    everything = global_batch(ranks)
    whole = ya.params.without_markers(plain(base_params(3)))

    def of_layers(layers: Any, params: Params, batch: Batch) -> ya.Mean:
        return base_loss(params._replace(layers=layers), batch)

    def with_scale(scale: dict[str, Tensor], params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(embed, params.embed, batch["tokens"]) * scale["embed"]
        x, _ = ya.scan(lambda x, w, s: block(x * s, w), x, params.layers, consts=scale["layers"])
        return ya.apply(head, params.head, x, batch["targets"])

    scale = {"embed": torch.linspace(0.5, 1.5, E), "layers": torch.tensor(1.1)}
    for parts in (1, 3):
        some = ya.value_and_grad(of_layers, microbatches=parts)
        expected = ya.value_and_grad(of_layers)(whole.layers, whole, everything)
        both = ya.value_and_grad(with_scale, argnums=(0, 1), microbatches=parts)
        value, (plain_scale, plain_params) = ya.value_and_grad(with_scale, argnums=(0, 1))(scale, whole, everything)
        for _ in range(3):
            got, grads = some(state.params.layers, state.params, batch)
            compare((got, grads), expected, 1e-5, f"{parts} microbatches: the layers alone")
            got, (of_scale, of_params) = both(scale, state.params, batch)
            compare((got, of_params), (value, plain_params), 1e-5, f"{parts} microbatches: beside a scale")
            for leaf in of_scale.values():
                if ranks > 1:
                    torch.distributed.all_reduce(leaf, group=mesh.get_group())
            compare(of_scale, plain_scale, 1e-5, f"{parts} microbatches: the scale")
