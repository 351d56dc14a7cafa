"""Derivatives of models over axes, to the second order, by torch's math attention, as on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import yafsdp_fn as ya
from tests.axes.test_exact import FLOAT64, close
from tests.axes.test_llama import CONTEXT, EXPERT, FAMILIES, SEQUENCE, Case, batch_of, config_of, on_their_ranks, wide
from tests.harness.pool import on_ranks

MIXTRAL: dict[str, Any] = {"experts": 4, "router_loss": True, "router_coef": 0.1, "router_z_coef": 0.01}
CASES = {
    "gpt2, sequence": Case({"tensor": 2}, SEQUENCE, family="gpt2"),
    "context": Case({"context": 2}, CONTEXT),
    "uneven": Case({"expert": 2}, EXPERT, MIXTRAL, family="mixtral"),
    "capacity": Case({"expert": 2}, EXPERT, MIXTRAL, family="mixtral", capacity=0.6),
    "shard, tensor": Case({"shard": 2, "tensor": 2}, SEQUENCE),
}


@on_ranks()
@pytest.mark.parametrize(("world", "case"), on_their_ranks(CASES, ("uneven", "shard, tensor")))
def test_derivatives_of_any_order(_: Any, case: Case) -> None:
    config = config_of(case)
    family = FAMILIES[case.family]
    axes = case.axes
    limit = {} if case.capacity is None else {"capacity": case.capacity}
    mesh = ya.mesh(device="cpu", **case.mesh)
    found = []
    state = ya.init(wide(family.params(config, **axes.options)), mesh=mesh, precision=FLOAT64)
    plain = ya.PlainState.create(wide(family.params(config)), ya.optim.sgd(0.1))
    batch = batch_of(0)
    with sdpa_kernel(SDPBackend.MATH):
        for params, over, given in ((state.params, axes, axes.shard_batch(batch, mesh)), (plain.params, None, batch)):
            loss = family.loss(config, axes=over, **limit)
            direction = ya.normal_like(5, params)
            f = ya.functional_loss(lambda p, loss=loss, given=given: loss(p, given))
            slope = jvp(f, (params,), (direction,))[1]
            gradient, along = jvp(grad(f), (params,), (direction,))
            twice = grad(lambda p, f=f, d=direction: ya.vdot(grad(f)(p), d))(params)
            found.append([slope, *(ya.unshard(each) for each in (gradient, along, twice))])
    for name, *pair in zip(("slope", "gradient", "forward over reverse", "reverse over reverse"), *found, strict=True):
        close(*map(ya.params.without_markers, pair), name)
