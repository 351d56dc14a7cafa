"""Leaves of a dtype of their own (`Param(compute=, reduce=)`), against the plain loop with the same casts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.formats import (
    F64,
    LAYERS,
    TX,
    Plain,
    across_stages,
    alike,
    derivatives,
    gradients,
    gradients_over_tensor,
    loss_of,
    normal,
    planned_program,
    schedules_for,
    sent,
    three_steps,
    two_steps_are_plain,
    two_steps_of_micro_shards,
)
from tests.harness.marks import nightly
from tests.harness.meshes import MESHES, made
from tests.harness.oracle import batch_of, by_autograd, compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import E, V, masked_loss

BF16 = torch.bfloat16
F32 = torch.float32
X = 4
HALF = ya.Precision(F64, compute=BF16, reduce=F64)
"""Sums in float64: what is off by more than 1e-12 was rounded in another place."""

Own = Callable[..., ya.Param]


def tree(kind: str = "plain", *, compute: torch.dtype = F32, reduce: torch.dtype | None = None) -> dict[str, Any]:
    """A router, a gain, a decay and a head's gain of a dtype of their own."""
    own: Own = functools.partial(normal, compute=compute, reduce=reduce)
    L = LAYERS
    layer: dict[str, Any] = {
        "up": normal(L, X, E),
        "router": own(L, X, E),
        "decay": own(L, X),
        "down": normal(L, E, X),
        "gain": own(L, E),
    }
    if kind == "marked":
        layer["gain"] = ya.Pinned(layer["gain"])
        layer["decay"] = ya.Unit({"rate": layer["decay"], "shift": normal(L, X)})
        layer["down"] = ya.frozen(layer["down"])
        layer["router"] = ya.frozen(layer["router"])
    embed = own(V, E) if kind == "tied" else normal(V, E)
    out = {} if kind == "tied" else {"out": normal(V, E)}
    return {"embed": embed, "layers": ya.Stacked(layer), "head": {"scale": own(E), **out}}


def block(x: Tensor, w: dict[str, Any]) -> tuple[Tensor, None]:
    decay = w["decay"]
    if isinstance(decay, dict):
        decay = decay["rate"] + decay["shift"].to(decay["rate"].dtype)
    scores = ya.linear(x.to(w["router"].dtype), w["router"]).softmax(-1)
    kept = scores * torch.exp(-torch.exp(decay))
    y = torch.tanh(ya.linear(x, w["up"])) * kept.to(x.dtype)
    more = ya.linear(y, w["down"])
    return x + (more.to(w["gain"].dtype) * w["gain"]).to(x.dtype), None


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """torch's: a slot sums up rows in the reduce dtype, autograd in the compute dtype."""
    return F.embedding(tokens, table).to(BF16)


def head(w: dict[str, Tensor], table: Tensor, x: Tensor, targets: Tensor) -> ya.Mean:
    x = (x.to(w["scale"].dtype) * w["scale"]).to(table.dtype)
    return masked_loss(F.linear(x, table), targets)


loss = loss_of(embed, block, head)


STEPS = ("zero2", "zero3, recomputed", "hpz")
"""The schedules that take three steps, as well."""

NAMES = ("zero1", "zero2", "zero3, recomputed", "zero3, far", "fsdp2")


def plain_of(abstract: Any) -> Plain:
    return Plain(abstract, loss, BF16)


def exact(_: Any, name: str, kind: str, parts: int, schedule: str, copy: bool) -> None:
    """One rank's part: gradients and three steps."""
    mesh = made(name)
    tolerance = 1e-6 if kind == "tied" else 1e-12  # two uses: added up in float64 in a slot, by autograd in float32
    one = {schedule: schedules_for(mesh)[schedule]}
    precision = dataclasses.replace(HALF, copy=copy)
    gradients(mesh, name, plain_of(tree(kind)), one, parts, tolerance, precision)
    if schedule in STEPS:
        three_steps(mesh, name, plain_of(tree(kind)), one, parts, 10 * tolerance, precision)


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "marked", "tied"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("copy", [True, False])
def test_gradients_and_steps_are_those_of_the_plain_loop(
    pools: Pools, world: int, kind: str, parts: int, schedule: str, copy: bool
) -> None:
    pools[world].run(exact, "shard", kind, parts, schedule, copy)


@on_ranks(1)
def test_bits_at_one_rank(mesh: Any) -> None:
    half = ya.Precision(compute=BF16)
    for precision in (half, dataclasses.replace(half, copy=False), ya.Precision(F32, BF16, BF16, F32)):
        abstract = tree(reduce=F32)
        state = ya.init(abstract, TX, mesh=mesh, precision=precision)
        params = ya.unshard(state)
        with by_autograd():
            expected = plain_of(abstract).value_and_grad(params, [batch_of(0)])
            for schedule in schedules_for(mesh).values():
                value, grads = ya.value_and_grad(loss, schedule=schedule)(state.params, batch_of(0))
                compare((value, ya.unshard(grads)), expected, 0.0 if precision.reduce == F32 else 1e-2, "bits")
                own = [("layers", "router"), ("layers", "gain"), ("head", "scale")]
                for unit, leaf in own:  # never rounded
                    assert torch.equal(ya.unshard(grads)[unit][leaf], expected[1][unit][leaf]), (unit, leaf)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [(mesh, name) for mesh in MESHES for name in (*NAMES, *(["hpz"] if "local" in MESHES[mesh] else []))],
)
@pytest.mark.parametrize("copy", [True, False])
def test_on_every_mesh(pools: Pools, mesh: str, schedule: str, copy: bool) -> None:
    pools[4].run(exact, mesh, "marked", 1, schedule, copy)


# ---- what travels


@on_ranks(2, 3)
def test_what_travels_is_what_the_program_says(mesh: Any) -> None:
    for accumulate in (None, F32):
        precision = ya.Precision(compute=BF16, reduce=BF16, accumulate=accumulate)
        state = ya.init(tree(reduce=F32), TX, mesh=mesh, precision=precision)
        for counted, said in sent(loss, state, batch_of(mesh.get_rank())):
            assert counted == said > 0


# ---- with what else there is


@on_ranks(1, 2)
def test_derivatives_by_torch(mesh: Any) -> None:
    """Products are in bf16, of which torch makes those of tangents otherwise."""
    abstract = tree()
    derivatives(mesh, plain_of(abstract), ya.init(abstract, TX, mesh=mesh, precision=HALF), 5e-2)


def reproduced(_: Any) -> int:
    return two_steps_of_micro_shards(loss, tree(reduce=F32), TX, ya.Precision(compute=BF16, reduce=BF16))


def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: Pools) -> None:
    alike(pools, (1, 2, 4), reproduced)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["marked", "tied"])
@on_ranks(2, nightly(4))
def test_across_stages(_: Any, kind: str) -> None:
    plain = plain_of(tree(kind, reduce=F64))
    across_stages(plain, ya.schedules.zero2(), 1e-6 if kind == "tied" else 1e-12, HALF)


@on_ranks(1, 2, 3)
def test_whole_leaves_go_to_their_owners(mesh: Any) -> None:
    """Muon lends matrices of both kinds to their owners."""
    two_steps_are_plain(mesh, plain_of(tree()), ya.optim.muon(0.02, dtype=F64), HALF)


@on_ranks(1, 2)
def test_adapters(mesh: Any) -> None:
    """Adapters are of the dtype of their matrix."""
    abstract = ya.lora(tree(), 2, lambda path, _: path.endswith(("router", "up")))
    router = abstract["layers"].tree["router"]
    assert router.a.compute == router.b.compute == F32
    assert abstract["layers"].tree["up"].a.compute is None
    state = ya.init(abstract, TX, mesh=mesh, precision=HALF)
    stored = {g.name: leaf.dtype for _, g, leaf in state.params["layers"].group_leaves()}
    assert stored["layers.frozen(float32)"] == F32
    assert stored["layers.frozen"] == BF16
    one = {"zero3": ya.schedules.zero3()}
    gradients(mesh, "shard", plain_of(abstract), one, 1, 1e-12, HALF)
    three_steps(mesh, "shard", plain_of(abstract), one, 1, 1e-11, HALF)


@on_ranks(2, 4)
def test_over_tensor(_: Any) -> None:
    """Leaves in float32 that are split, and that are not; all else in float64."""
    draw = functools.partial(normal, 2)
    layer = {
        "up": draw(8, E, split={"tensor": -2}),
        "scale": draw(8, split={"tensor": -1}, compute=F32),
        "down": draw(E, 8, split={"tensor": -1}, compute=F32, reduce=F32),
        "gain": draw(E, compute=F32),
    }
    abstract = {"embed": normal(V, E), "layers": ya.Stacked(layer)}

    for (value, grads), expected in gradients_over_tensor(abstract):
        compare(value, expected[0], 1e-12, "value")
        compare(grads, expected[1], 1e-6, "gradients")
        compare(grads["embed"], expected[1]["embed"], 1e-12, "gradients in float64")


@on_ranks(2)
def test_a_plan_is_of_the_state(mesh: Any) -> None:
    """A trace without ranks is that of the state."""
    abstract = tree("marked", reduce=BF16)
    state = ya.init(abstract, TX, mesh=mesh, precision=HALF)
    program = planned_program(loss, abstract, state, TX)
    step = ya.train_step(loss, TX)
    state, _ = step(state, batch_of(mesh.get_rank()))
    assert step.program(state).ops == program.ops
