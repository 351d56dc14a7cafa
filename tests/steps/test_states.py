"""States side by side, copied, replaced and stepped by hand; programs looked at ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import bits, same
from tests.harness.oracle import batch_of, check_steps, own_and_all
from tests.harness.pool import on_ranks
from tests.harness.problems import CLIPPED as TX
from tests.harness.problems import PROBLEMS, SCHEDULES, base_loss, base_params, stacks_loss, stacks_params

WORLDS = on_ranks(1, 2)


# ---- several states


@WORLDS
def test_states_in_turn(mesh: Any) -> None:
    """States on one mesh, of three layouts and three precisions, share step functions; each goes as if alone."""
    rank = mesh.get_local_rank()
    kinds = [
        (base_params(3), base_loss, ya.Precision(), 0),
        (base_params(3), base_loss, ya.Precision(), 1),
        (stacks_params(3), stacks_loss, ya.Precision(), 0),
        (base_params(3), base_loss, ya.Precision(compute=torch.bfloat16), 0),
        (base_params(3), base_loss, ya.Precision(reduce=torch.bfloat16), 0),
        (base_params(4), base_loss, ya.Precision(), 0),
    ]

    def run(chosen: list[int]) -> dict[int, list[Tensor]]:
        steps = {loss: ya.train_step(loss, TX, microbatches=3) for loss in (base_loss, stacks_loss)}
        states = {}
        for at in chosen:
            params, _, precision, seed = kinds[at]
            states[at] = ya.init(params, TX, mesh=mesh, seed=seed, precision=precision)
        for number in range(3):
            for at in chosen:
                states[at], _ = steps[kinds[at][1]](states[at], batch_of(rank, seed=number))
        return {at: bits(state) for at, state in states.items()}

    together = run(list(range(len(kinds))))
    assert not same(together[0], together[1])
    for at, alone in together.items():
        assert same(run([at])[at], alone), at


@WORLDS
def test_without_donation(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    for precision in (ya.Precision(), ya.Precision(compute=torch.bfloat16)):
        state = ya.init(base_params(3), TX, mesh=mesh, precision=precision)
        keep, donate = (ya.train_step(base_loss, TX, donate=donated) for donated in (False, True))
        before = bits(state)
        first, metrics = keep(state, batch_of(rank))
        again, metrics_again = keep(state, batch_of(rank))
        assert same(bits(state), before)
        assert same(bits(first), bits(again))
        assert not same(bits(first), before)
        assert torch.equal(metrics["loss"], metrics_again["loss"])
        assert (state.step, first.step) == (0, 1)
        # all three go on from where they are, and none touches another's memory
        second, _ = donate(first, batch_of(rank, seed=1))
        assert same(bits(state), before)
        state, _ = donate(state, batch_of(rank))
        state, _ = donate(state, batch_of(rank, seed=1))
        assert same(bits(state), bits(second))
        again, _ = keep(again, batch_of(rank, seed=1))
        assert same(bits(state), bits(again))


@WORLDS
def test_replaced_parameters(mesh: Any) -> None:
    """A state whose parameters were replaced by others: the steps that follow start from those."""
    step = ya.train_step(base_loss, TX)
    mine, everything = own_and_all(mesh)
    state, _ = step(ya.init(base_params(3), TX, mesh=mesh), mine)
    oracle, _ = step(ya.PlainState.create(base_params(3), TX), everything)
    other, oracle_other = (
        dataclasses.replace(each, params=optree.tree_map(lambda x: x / 2, each.params)) for each in (state, oracle)
    )
    for number in range(3):
        batches = [own_and_all(mesh, seed=number)]
        # first the one that still shares the optimizer's state, which a step on the other would write to
        other, oracle_other = check_steps((step, other), (step, oracle_other), batches, 1e-5, "the other")
        state, oracle = check_steps((step, state), (step, oracle), batches, 1e-5, "the first")


@WORLDS
def test_parameters_of_another_state(mesh: Any) -> None:
    """A state that goes on from them keeps its own precision; the other state stays as it is."""
    step = ya.train_step(base_loss, TX)
    batches = [own_and_all(mesh)]
    state = ya.init(base_params(3), TX, mesh=mesh)
    other = ya.init(base_params(3), TX, mesh=mesh, seed=1, precision=ya.Precision(compute=torch.bfloat16))
    oracle, oracle_other = (ya.PlainState.create(base_params(3), TX, seed=seed) for seed in (0, 1))
    for params in (other.params, optree.tree_map(lambda of_other, _: of_other.clone(), other.params, state.params)):
        both = dataclasses.replace(state, params=params), dataclasses.replace(oracle, params=oracle_other.params)
        taken, _ = check_steps((step, both[0]), (step, both[1]), batches, 1e-5)
        assert taken.precision == state.precision
    assert step(other, batches[0][0])[0].step == 1


@WORLDS
def test_moments_of_a_copy(mesh: Any) -> None:
    """A state goes on with the moments that a copy of it has: the copy goes on from there, too."""
    step = ya.train_step(base_loss, TX)
    mine, everything = own_and_all(mesh)
    state, _ = step(ya.init(base_params(3), TX, mesh=mesh), mine)
    oracle, _ = step(ya.PlainState.create(base_params(3), TX), everything)
    kept = state.copy()
    oracle_kept = oracle
    state, oracle = check_steps((step, state), (step, oracle), [(mine, everything)], 1e-5, "one step")
    for number in range(2):
        state = dataclasses.replace(state, opt_state=kept.opt_state)
        oracle = dataclasses.replace(oracle, opt_state=oracle_kept.opt_state)
        batches = [own_and_all(mesh, seed=number)]
        state, oracle = check_steps((step, state), (step, oracle), batches, 1e-5, "with the copy's moments")
    check_steps((step, kept), (step, oracle_kept), [(mine, everything)], 1e-5, "the copy")


@WORLDS
def test_parameters_of_the_state_itself_in_a_batch(mesh: Any) -> None:
    """As a teacher of this step has them: the step donates them, and ends."""

    def loss(params: Any, batch: Any) -> Any:
        with torch.no_grad():
            taught = base_loss(batch["teacher"], batch)
        own = base_loss(params, batch)
        return ya.Mean(own.total * (1 + taught.total * 0), own.weight)

    mine, _ = own_and_all(mesh)
    found = []
    for each in (loss, base_loss):
        state = ya.init(base_params(3), TX, mesh=mesh)
        step = ya.train_step(each, TX)
        for _ in range(2):
            state, _ = step(state, mine | {"teacher": state.params})
        found.append(bits(state))
    assert same(*found)


@WORLDS
def test_batches_of_any_shape(mesh: Any) -> None:
    """A program depends on visits, never on shapes: batches may change theirs from step to step."""
    state = ya.init(base_params(3), TX, mesh=mesh)
    oracle = ya.PlainState.create(base_params(3), TX)
    step = ya.train_step(base_loss, TX)
    batches = [own_and_all(mesh, rows=rows) for rows in (3, 3, 1, 5, 2)]
    check_steps((step, state), (step, oracle), batches, 1e-5)


# ---- programs


@on_ranks(2)
def test_lower_before_any_step(mesh: Any) -> None:
    """What `lower` builds on fake tensors before any step is what the first step finds; it leaves the state alone."""
    batch = batch_of(mesh.get_local_rank())
    for number, (name, problem) in enumerate(PROBLEMS.items()):
        parts = (1, 3)[number % 2]
        state = ya.init(problem.params(3), TX, mesh=mesh)
        before = bits(state)
        step = ya.train_step(problem.loss, TX, schedule=SCHEDULES["zero3-remat-every"], microbatches=parts)
        ahead = step.lower(state, batch)
        with pytest.raises(RuntimeError, match=r"step.lower\(state, batch\) returns its program"):
            step.program(state)
        assert same(bits(state), before)
        state, _ = step(state, batch)
        program = step.program(state)
        what = f"{name}, {parts} microbatches"
        assert ahead.fingerprint() == program.fingerprint(), what
        assert ahead.ops == program.ops and ahead.trace.order == program.trace.order, what
        assert step.lower(state, batch).fingerprint() == ahead.fingerprint(), what
        assert all(visit.cost.flops >= 0 and visit.cost.carry_bytes > 0 for visit in ahead.trace.visits)
        ya.verify(program)
