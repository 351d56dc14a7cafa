"""Noise that a loss draws beside its visits: a function of seed, step, microbatch and rank of the batch, anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F_
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import by_day
from tests.harness.meshes import mesh_of
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import Batch, Params, base_params, dropout_block, embed, head, with_ends
from tests.harness.small import one_rank
from tests.steps.staged.models import F64
from yafsdp_fn import schedules as s

TX = ya.optim.adamw(1e-2)
PARTS = 2


def noisy_loss(params: Params, batch: Batch) -> tuple[ya.Mean, Any]:
    """Flow matching's draws before the first visit; others after visits, of what these gave and of nothing."""
    tokens = batch["tokens"]
    time = torch.rand(len(tokens), 1, 1, dtype=torch.float64)
    x = ya.apply(embed, params.embed, tokens)
    noise = torch.randn(x.shape, dtype=torch.float64)
    x = F_.dropout((1 - time) * x + time * noise, 0.2)
    late = torch.rand(x.shape[-1], dtype=torch.float64)
    x, _ = ya.scan(dropout_block, x, params.layers)
    x = x + late * torch.randn_like(x)
    target = torch.rand(tokens.shape) < 0.2
    mean = ya.apply(head, params.head, x + 0.1 * noise, batch["targets"].masked_fill(target, -1))
    return mean, {"drawn": time.flatten(), "late": late}


def loss_alone(params: Params, batch: Batch) -> ya.Mean:
    return noisy_loss(params, batch)[0]


def summed_loss(params: Params, batch: Batch) -> tuple[ya.Mean, Any]:
    """With aux that stages can bring together."""
    mean, aux = noisy_loss(params, batch)
    return mean, {key: ya.Sum(value.sum()) for key, value in aux.items()}


# ---- stages

STAGED = {
    "two segments each": (s.interleaved(s.zero2()), 2, "loop"),
    "v": (s.v_shaped(s.zero3(defer=True)), 2, "v"),
    "1f1b": (s.one_f_one_b(s.zero3(remat="all", update=True)), 1, "loop"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", by_day(STAGED, "v", "1f1b"))
def test_stages_draw_what_one_stage_draws(_: Any, name: str) -> None:
    """One rank's part: three steps and an evaluation as on plain tensors, whatever generators rank by rank hold."""
    schedule, per_stage, shape = STAGED[name]
    batch = batch_of(0, rows=4)
    abstract = base_params(5)
    trace = ya.planner.trace(summed_loss, abstract, batch, precision=F64, has_aux=True)
    assignment = s.assign(trace, 2, per_stage=per_stage, shape=shape)
    state = ya.init(abstract, TX, mesh=mesh_of(stage=2, shard=1), precision=F64, stages=assignment, seed=3)
    oracle = ya.PlainState.create(ya.unshard(state), TX, seed=3)
    options: Any = {"microbatches": PARTS, "has_aux": True}
    step = ya.train_step(summed_loss, TX, schedule=schedule, **options)
    plain = ya.train_step(summed_loss, TX, **options)
    torch.manual_seed(torch.distributed.get_rank())  # as others advise
    for number in range(3):
        before = torch.get_rng_state()
        if number == 1 and not name.startswith("1f1b"):
            gradient = ya.value_and_grad(summed_loss, schedule=schedule, **options)(state.params, batch)
            compare(gradient[0][0], plain(oracle, batch)[1]["loss"], 1e-12, f"{name}: gradient")
        state, metrics = step(state, batch)
        after = torch.get_rng_state()
        oracle, expected = plain(oracle, batch)
        for key in ("loss", "aux"):
            compare(metrics[key], expected[key], 1e-12, f"{name}, step {number}: {key}")
        compare(state, oracle.params, 1e-12, f"{name}, step {number}")
        assert torch.equal(after, before)
    found = ya.eval_step(summed_loss, schedule=schedule, **options)(state, batch)
    compare(found, ya.eval_step(summed_loss, **options)(oracle, batch), 1e-12, f"{name}: evaluation")


@with_ends
def by_value_loss(params: Params, x: Tensor) -> Any:
    return ya.scan(dropout_block, torch.poisson(x.detach().abs()), params.layers)[0]


@on_ranks(2)
def test_draws_that_depend_on_values_are_refused_across_stages(_: Any) -> None:
    units = s.Assignment(((0,), (0,), (1,), (1,)), (0, 1))
    state = ya.init(base_params(2), TX, mesh=mesh_of(stage=2, shard=1), stages=units)
    with pytest.raises(RuntimeError, match=r"^poisson beside the visits, of what one has made"):
        ya.train_step(by_value_loss, TX)(state, batch_of(0))


# ---- ranks of one stage


def drawn(mesh: Any, batch: Batch, parts: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank draws in a step and in an evaluation of it, [rows], and what a visit drops out."""
    state = ya.init(base_params(2), TX, mesh=mesh, precision=F64, seed=5)
    options: Any = {"microbatches": parts, "has_aux": True}
    seen = ya.eval_step(noisy_loss, **options)(state, batch)["aux"]["drawn"]
    _, metrics = ya.train_step(noisy_loss, TX, **options)(state, batch)
    return metrics["aux"]["drawn"].flatten(), seen.flatten(), metrics["aux"]["late"]


def draws_of_rank(_: Any, axes: dict[str, int]) -> Any:
    mesh = mesh_of(**axes)
    rows = {"tokens": torch.arange(40).reshape(8, 5) % 37, "targets": torch.arange(40).reshape(8, 5) % 31}
    parts = None if "deterministic" in axes else PARTS
    return [found.tolist() for found in drawn(mesh, ya.shard_batch(rows, mesh), parts)]


@pytest.mark.parametrize("axes", [{}, {"replicate": 2}, {"expert": 2}], ids=str)
def test_ranks_with_other_rows_draw_other_noise_each_as_its_plain_state(pools: Pools, axes: dict[str, int]) -> None:
    found = pools[2].run(draws_of_rank, axes)
    plain = ya.train_step(noisy_loss, TX, microbatches=PARTS, has_aux=True)
    for rank, (trained, seen, late) in enumerate(found):
        state = ya.PlainState.create(double(), TX, seed=5, rank=rank)
        expected = plain(state, batch_of(0, rows=4))[1]["aux"]
        assert trained == seen == expected["drawn"].flatten().tolist()
        assert late == expected["late"].tolist()
    assert not set(found[0][0]) & set(found[1][0])


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_ranks_that_share_rows_draw_alike(pools: Pools, axis: str) -> None:
    one, other = pools[2].run(draws_of_rank, {axis: 2})
    assert one == other


def test_a_deterministic_mesh_draws_by_micro_shard(pools: Pools) -> None:
    (alone,), two = pools[1].run(draws_of_rank, {"deterministic": 4}), pools[2].run(draws_of_rank, {"deterministic": 4})
    rows = torch.tensor(alone[0]).reshape(4, 2)
    assert [torch.tensor(found[0]).tolist() for found in two] == [rows[at::2].flatten().tolist() for at in (0, 1)]
    assert len(set(alone[0])) == 8


# ---- one rank


def double() -> Any:
    """The parameters of a state in float64."""
    return ya.unshard(ya.init(base_params(2), TX, mesh=one_rank(), precision=F64, seed=5))


@pytest.mark.parametrize("sharded", [True, False])
def test_generators_are_given_back(sharded: bool) -> None:
    state: Any = ya.init(base_params(2), TX, mesh=one_rank(), precision=F64)
    if not sharded:
        state = ya.PlainState.create(ya.unshard(state), TX)
    batch, torchs = batch_of(0), torch.get_rng_state()
    ya.eval_step(loss_alone)(state, batch)
    if sharded:
        ya.value_and_grad(loss_alone)(state.params, batch)
    step = ya.train_step(loss_alone, TX)
    for _ in range(2):
        state, _ = step(state, batch)
        assert torch.equal(torch.get_rng_state(), torchs)

    def failing(params: Params, batch: Batch) -> ya.Mean:
        loss_alone(params, batch)
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        ya.train_step(failing, TX)(state, batch)
    assert torch.equal(torch.get_rng_state(), torchs)


class NoisyBackward(torch.autograd.Function):
    """The identity, with a gradient that is rounded by chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.01 * torch.rand_like(grad)


@pytest.mark.parametrize("remat", ["none", "all"])
def test_a_backward_draws_by_step_and_microbatch(remat: str) -> None:
    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return dropout_block(NoisyBackward.apply(x), w)

    @with_ends
    def loss(params: Params, x: Tensor) -> Any:
        return ya.scan(block, NoisyBackward.apply(x), params.layers)[0]

    state = ya.init(base_params(2), TX, mesh=one_rank(), precision=F64)
    oracle = ya.PlainState.create(ya.unshard(state), TX)
    step = ya.train_step(loss, TX, schedule=s.zero3(remat=remat), microbatches=3)
    plain = ya.train_step(loss, TX, microbatches=3)
    batch = batch_of(0)
    for number in range(3):
        torch.manual_seed(number)
        state, _ = step(state, batch)
        oracle, _ = plain(oracle, batch)
        compare(state, oracle.params, 1e-12, f"step {number}")


def test_a_tree_without_a_state_draws_from_torchs_generators() -> None:
    """There is no step, by which the next call would draw other numbers."""
    value = ya.value_and_grad(loss_alone)
    params = double()
    first, second = (value(params, batch_of(0))[0] for _ in range(2))
    assert first != second
