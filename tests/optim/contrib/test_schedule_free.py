"""Schedule-free learning: the average that is evaluated, on plain and on sharded trees, and with frozen leaves."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import check_steps, compare
from tests.harness.pool import on_ranks
from tests.harness.small import Model, batches, loss, model
from tests.optim.trees import assert_close, defined_step, plain_state
from tests.optim.trees import model as tree
from yafsdp_fn import optim


def test_at_a_constant_rate_it_is_the_mean_of_the_base_optimizer() -> None:
    """y, z and x by their definition in the paper."""
    tx = optim.contrib.schedule_free(optim.sgd(0.1), 0.1, b1=0.7)
    b1 = 0.7
    params = tree(0, torch.float64)
    state = tx.init(params)
    z = params
    seen = []
    for step in range(6):
        grads = tree(step + 1, torch.float64)
        params, state = defined_step(tx, params, grads, state)
        z = optree.tree_map(lambda z, g: z - 0.1 * g, z, grads)
        seen.append(z)
        x = optree.tree_map(lambda *each: sum(each) / len(each), *seen)
        assert_close(state.z, z, 1e-12)
        assert_close(optim.contrib.schedule_free_eval_params(state, params), x, 1e-12)
        assert_close(params, optree.tree_map(lambda x, z: b1 * x + (1 - b1) * z, x, z), 1e-12)


def test_steps_of_a_rate_of_zero_do_not_count() -> None:
    rate = optim.warmup_constant_schedule(0.0, 0.1, 2)
    tx = optim.contrib.schedule_free(optim.sgd(rate), rate)
    params = tree(0)
    state = tx.init(params)
    # the warm-up's rate is read one step ahead, as in Optax
    assert [float(state.weight_sum)] + [
        float((state := defined_step(tx, params, tree(1), state)[1]).weight_sum) for _ in range(3)
    ] == pytest.approx([0, 0.05**2, 0.05**2 + 0.1**2, 0.05**2 + 2 * 0.1**2])


def test_the_state_is_as_wide_as_it_is_told() -> None:
    params = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    state = optim.contrib.schedule_free_adamw(state_dtype=torch.float32).init(params)
    assert state.z["w"].dtype == state.weight_sum.dtype == torch.float32
    assert optim.contrib.schedule_free_eval_params(state, params)["w"].dtype == torch.bfloat16


def with_frozen() -> Model:
    return model()._replace(embed=ya.frozen({"weight": ya.Param((11, 5))}))


@on_ranks(1, 2)
def test_the_average_of_a_sharded_state_is_evaluated(mesh: Any) -> None:
    tx = optim.contrib.schedule_free_adamw(0.05, 2)
    state = ya.init(with_frozen(), tx, mesh=mesh, precision=ya.Precision(torch.float64))
    expected = plain_state(with_frozen(), tx)
    step = ya.train_step(loss, tx)
    each = list(batches(mesh, 4))
    state, expected = check_steps((step, state), (step, expected), each, 1e-12)
    mine, everything = each[-1]
    x = optim.contrib.schedule_free_eval_params(state.opt_state, state.params)
    of_plain = optim.contrib.schedule_free_eval_params(expected.opt_state, expected.params)
    compare(ya.unshard(x), of_plain, 1e-12, "the average")
    assert torch.equal(ya.unshard(x).embed["weight"], ya.unshard(state).embed["weight"])
    of_x = ya.eval_step(loss)(x, mine)["loss"]
    torch.testing.assert_close(of_x, ya.eval_step(loss)(of_plain, everything)["loss"], rtol=1e-12, atol=0)
    assert abs(float(of_x - ya.eval_step(loss)(state, mine)["loss"])) > 1e-4


def test_errors() -> None:
    tx = optim.contrib.schedule_free(optim.sgd(1.0), 1.0)
    with pytest.raises(ValueError, match=r"expected b1 in \(0, 1\], got 0"):
        optim.contrib.schedule_free(optim.sgd(0.1), 0.1, b1=0.0)
    for needs in (tx, optim.add_decayed_weights(0.1)):
        with pytest.raises(ValueError, match=r": needs the parameters: call `tx\.update\(updates, state, params\)`"):
            needs.update(tree(1), needs.init(tree(0)))
    chained = optim.chain(optim.clip_by_global_norm(1.0), tx)
    with pytest.raises(TypeError, match=r"expected a ScheduleFreeState, got tuple; of a chain pass the part"):
        optim.contrib.schedule_free_eval_params(chained.init(tree(0)), tree(0))
