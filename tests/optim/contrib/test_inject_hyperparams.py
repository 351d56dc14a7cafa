"""Hyperparameters in the state: changed between steps, on every rank, with the program as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import assert_equal, batch, loss, model
from tests.harness.watching import Watch
from tests.optim.trees import bits, matrices, trains_as_momentum
from tests.optim.trees import model as tree
from yafsdp_fn import optim

RATES = [0.5, 0.5, 0.01, 0.2, 0.2]


@pytest.mark.sampled
@pytest.mark.parametrize("in_program", [False, True])
@on_ranks(1, 2)
def test_a_rate_may_be_changed_between_steps(mesh: Any, in_program: bool) -> None:
    """A rate that is changed between steps, against SGD with that rate; the program stays, and its bits."""
    programs: list[Any] = []

    def change(state: Any, step: Any) -> None:
        state.opt_state.hyperparams["learning_rate"].fill_(RATES[state.step])
        programs.extend([step.program(state)] if state.step else [])

    tx = optim.contrib.inject_hyperparams(optim.sgd)(RATES[0], momentum=0.9)
    trains_as_momentum(mesh, tx, RATES.__getitem__, 1e-12, change, in_program)
    assert len(programs) == 4 and all(program is programs[1] for program in programs[1:])


@on_ranks(2)
def test_changes_are_kept(mesh: Any, tmp_path: Path) -> None:
    """Through a checkpoint, and when a state is sharded anew."""
    tx = optim.contrib.inject_hyperparams(optim.adamw)(0.1, b1=lambda count: 0.9 - 0.1 / (count + 1))
    state, step = ya.init(model(), tx, mesh=mesh), ya.train_step(loss, tx)
    state.opt_state.hyperparams["learning_rate"].fill_(0.03)
    state, _ = step(state, batch(mesh.get_rank()))
    ya.checkpoint.save(tmp_path, state)
    loaded, _ = ya.checkpoint.load(tmp_path, like=ya.init(model(), tx, mesh=mesh, seed=1))
    for other in (loaded, ya.shard(state, tx)):
        assert float(other.opt_state.hyperparams["learning_rate"]) == pytest.approx(0.03)
        assert_equal((other.params, other.opt_state), (state.params, state.opt_state))


def test_numbers_may_be_written_over_by_numbers() -> None:
    ends = []
    for write in (lambda at, value: at["b2"].fill_(value), lambda at, value: at.update(b2=value)):
        tx, params = optim.contrib.inject_hyperparams(optim.scale_by_adam)(b2=0.9), tree(0)
        state = tx.init(params)
        for number in range(3):
            write(state.hyperparams, 0.5 + 0.1 * number)
            state = optim.step_(tx, params, tree(number + 1), state)
        ends.append(bits(params))
    assert ends[0] == ends[1]


def test_schedules_are_read_at_the_count() -> None:
    rate = optim.linear_schedule(0.1, 0.0, 4)
    tx, params = optim.contrib.inject_hyperparams(optim.sgd)(rate), tree(0)
    state = tx.init(params)
    for count in range(3):
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(rate(max(count - 1, 0)))
        state.hyperparams["learning_rate"].fill_(7.0)  # has no effect
        expected = optree.tree_map(lambda p, g, at=count: p - rate(at) * g, params, tree(1))
        state = optim.step_(tx, params, tree(1), state)
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b), params, expected)


def test_what_is_injected() -> None:
    tx = optim.contrib.inject_hyperparams(optim.adamw, static_args=("mask", "b1", "b2", "eps"))(0.1, mask=matrices)
    params = tree(0)
    state = tx.init(params)
    assert set(state.hyperparams) == {"learning_rate", "weight_decay"}
    assert all(value.shape == () and value.dtype == torch.float32 for value in state.hyperparams.values())
    assert tx.init(tree(0, torch.float64)).hyperparams["learning_rate"].dtype == torch.float64
    nesterov = optim.contrib.inject_hyperparams(optim.sgd)(0.1, 0.9, nesterov=True)
    assert set(nesterov.init(params).hyperparams) == {"learning_rate", "momentum"}


def test_the_host_reads_nothing_where_no_factory_looks_at_its_numbers() -> None:
    tx = optim.contrib.inject_hyperparams(optim.adamw, static_args=("b1", "b2", "eps"))(
        optim.linear_schedule(0.1, 0.0, 4)
    )
    params, grads, found_inf = tree(0), tree(1), torch.zeros(())
    state = tx.init(params)
    with Watch() as watch:
        optim.step_(tx, params, grads, state, found_inf=found_inf)
    assert "aten::_local_scalar_dense" not in watch.ops


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"static_args has rate, no argument of sgd, which has learning_rate, momentum"
    ):
        optim.contrib.inject_hyperparams(optim.sgd, static_args="rate")
    with pytest.raises(TypeError, match=r"mask is a function, so it is taken for a schedule.*static_args='mask'"):
        optim.contrib.inject_hyperparams(optim.adamw)(0.1, mask=matrices)
    with pytest.raises(ValueError, match=r"b1 and b2 in \[0, 1\)"):
        optim.contrib.inject_hyperparams(optim.adamw)(0.1, b2=1.0)
    with pytest.raises(TypeError, match="missing a required argument: 'learning_rate'"):
        optim.contrib.inject_hyperparams(optim.adamw)()
