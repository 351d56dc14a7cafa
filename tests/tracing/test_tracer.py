"""Traces on fake tensors: what is visited and what it costs, without a computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.small import B, L, Model, batch, block, embed, head, loss, model, one_rank
from yafsdp_fn.schedules import Gather, Trace

TX = ya.optim.sgd(0.1)


def trace(fun: Any = loss, layers: int = L, **options: Any) -> Trace:
    state = ya.init(model(layers), TX, mesh=one_rank())
    return ya.train_step(fun, TX, **options).trace(state, batch())


def test_costs_are_of_one_microbatch() -> None:
    whole = trace().visits[1].cost
    half = trace(microbatches=2).visits[1].cost
    assert half.flops * 2 == whole.flops
    assert half.kept_bytes * 2 == whole.kept_bytes


def counted(calls: list[str]) -> Any:
    """`loss` with blocks that write down when they run."""

    def say(name: str, f: Any) -> Any:
        def block(*args: Any) -> Any:
            calls.append(name)
            return f(*args)

        return block

    first = say("embed", embed)
    layer = say("layer", block)
    last = say("head", head)

    def run(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(first, p.embed, b["tokens"])
        x, _ = ya.scan(layer, x, p.layers)
        x, _ = ya.scan(layer, x, p.layers, reverse=True)
        mean: ya.Mean = ya.apply(last, p.head, x, b["targets"])
        return mean

    return run


def test_one_body_runs_for_all_layers() -> None:
    calls: list[str] = []
    found = trace(counted(calls), 50)
    # of the first layer, whose carry may not require grad yet, and of any later one
    assert calls.count("layer") <= 2
    assert calls.count("embed") == calls.count("head") == 1
    assert [visit.units[0] for visit in found.visits[1:-1]] == [*range(1, 51), *range(50, 0, -1)]
    assert len({(visit.cost.flops, visit.cost.kept_bytes) for visit in found.visits[1:-1]}) == 1


def test_another_shape_is_another_signature() -> None:
    calls: list[str] = []

    def grows(p: Model, b: Any) -> Tensor:
        def layer(c: Tensor, w: Any) -> tuple[Tensor, None]:
            calls.append("layer")
            return block(c, w)

        x = ya.apply(embed, p.embed, b["tokens"])
        return ya.scan(layer, x, p.layers)[0].sum() + ya.scan(layer, x[:1], p.layers)[0].sum()

    visits = trace(grows).visits
    assert len(calls) == 2
    assert [visit.cost.flops for visit in visits[1:]] == [visits[1].cost.flops] * L + [visits[1].cost.flops // B] * L


def test_another_argument_is_another_signature() -> None:
    """The same block, told by a number to return other things."""

    def layer(c: Tensor, w: Any, wide: Any) -> tuple[Tensor, Any]:
        return block(c, w)[0], (c, c) if wide["wide"] else c

    def run(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        _, narrow = ya.scan(layer, x, p.layers, consts={"wide": False})
        _, wide = ya.scan(layer, x, p.layers, consts={"wide": True})
        assert isinstance(wide, tuple)
        assert isinstance(narrow, Tensor)
        return narrow.sum() + wide[1].sum()

    assert len(trace(run).visits) == 1 + 2 * L


def test_so_is_another_number_of_layers_of_one_unit() -> None:
    def run(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        return ya.scan(block, x, p.layers, unroll=2, order=[1, 1, 1])[0].sum()

    _, two, one = trace(run).visits
    assert two.units == one.units
    assert two.cost.flops == 2 * one.cost.flops


def test_nothing_is_computed_and_nothing_drawn() -> None:
    state = ya.init(model(), TX, mesh=one_rank())
    seen: list[type] = []

    def watched(p: Model, b: Any) -> ya.Mean:
        x = ya.apply(embed, p.embed, b["tokens"])
        seen.append(type(x))
        x = torch.nn.functional.dropout(x, 0.5)
        mean: ya.Mean = ya.apply(head, p.head, x, b["targets"])
        return mean

    before = [leaf.clone() for leaf in state.params.layers.leaves]
    ambient = torch.get_rng_state()
    ya.train_step(watched, TX).trace(state, batch())
    assert seen == [torch._subclasses.FakeTensor]
    assert all(torch.equal(a, b) for a, b in zip(before, state.params.layers.leaves, strict=True))
    assert torch.equal(torch.get_rng_state(), ambient)


@pytest.mark.parametrize("use", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x[x > 0]])
def test_a_loss_that_needs_values_says_what_to_do(use: Any) -> None:
    def needy(p: Model, b: Any) -> Tensor:
        x = ya.apply(embed, p.embed, b["tokens"])
        use(x)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"the loss depends on the values of tensors .*: run one step, then lower"):
        trace(needy)
    state = ya.init(model(), TX, mesh=one_rank())
    step = ya.train_step(needy, TX)
    state, _ = step(state, batch())
    assert step.lower(state, batch()).count(Gather) == 1
