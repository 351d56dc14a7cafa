"""Transformations beyond Adam and SGD: on several ranks, after the program and inside of it; what each is for."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import batch, loss, model, one_rank
from tests.harness.watching import Watch
from tests.optim.test_step import ALL
from tests.optim.trees import bits, matrices, trains_as_plain
from tests.optim.trees import model as tree
from yafsdp_fn import optim

STEPS = 5


def ramp(count: Any) -> Any:
    return 0.02 / (count + 1)


WARM = optim.warmup_constant_schedule(0.0, 0.05, 2)
TXS: dict[str, Any] = {
    "lion": optim.lion(ramp, weight_decay=0.1, mask=matrices),
    "lion, bfloat16": optim.lion(0.01, 0.8, mu_dtype=torch.bfloat16),
    "schedule_free_adamw": optim.chain(
        optim.clip_by_global_norm(0.5), optim.contrib.schedule_free_adamw(0.05, 2, weight_decay=0.1)
    ),
    "schedule_free": optim.contrib.schedule_free(optim.sgd(WARM, momentum=0.5), WARM),
    "one in another": optim.contrib.schedule_free(optim.lion(WARM), WARM),
}
WHOLE: dict[str, Any] = {
    "schedule_free, clipped": optim.contrib.schedule_free(
        optim.chain(optim.clip_by_global_norm(0.3), optim.adam(0.05)), 0.05
    ),
}
"""What needs to know more than a unit: not inside of a program."""


@on_ranks(2)
@pytest.mark.parametrize("name", TXS | WHOLE)
def test_trains_shards_as_it_trains_plain_trees_and_unit_by_unit_to_the_same_bits(mesh: Any, name: str) -> None:
    """Five steps, of which the third is skipped: after the program, and inside of it where that can be."""
    # a moment in bfloat16 moves by a whole place of it where a mean does by a last one
    loose = 1e-3 if "bfloat16" in name else 1e-12
    how: Any = {"skips": True, "steps": STEPS, "tolerance": loose, "of_state": 4 * loose}
    trains_as_plain(mesh, (TXS | WHOLE)[name], inside=name in TXS, **how)


@pytest.mark.parametrize("name", TXS | WHOLE)
def test_the_host_reads_nothing(name: str) -> None:
    tx = (TXS | WHOLE)[name]
    params = tree(0)
    grads = tree(1)
    state = tx.init(params)
    found_inf = torch.zeros(())
    if name == "lion":
        tx = optim.lion(ramp)  # the mask of a plain tree is read
    with Watch() as watch:
        optim.step_(tx, params, grads, state, found_inf=found_inf)
    assert "aten::_local_scalar_dense" not in watch.ops


PLAIN: dict[str, Any] = {name: ALL[name]() for name in ("adamw_masked", "nesterov", "clip_late", "masked_whole")}


@pytest.mark.parametrize("name", TXS | WHOLE | PLAIN)
def test_update_is_pure(name: str) -> None:
    tx = (TXS | WHOLE | PLAIN)[name]
    params = tree(0)
    grads = tree(1)
    state = tx.init(params)
    before = bits((params, grads, state))
    first = tx.update(grads, state, params)
    second = tx.update(grads, state, params)
    assert bits((params, grads, state)) == before
    assert bits(first) == bits(second)
    assert tx.elementwise
    assert optree.tree_structure(first[1]) == optree.tree_structure(state)


@pytest.mark.parametrize("name", TXS | WHOLE)
def test_a_program_is_built_before_any_step(name: str) -> None:
    """On fake tensors, which have no values to read."""
    tx = (TXS | WHOLE)[name]
    state = ya.init(model(), tx, mesh=one_rank())
    memory = ya.train_step(loss, tx).lower(state, batch()).trace.optimizer
    assert memory.fixed == sum(leaf.nbytes for leaf in optree.tree_leaves(state.opt_state) if leaf.ndim == 0)
