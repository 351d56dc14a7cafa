"""Every optimizer of the library trains shards as it trains plain trees: in float64, on any number of ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import compare, joined, plain
from tests.harness.pool import Pool
from tests.harness.small import batch, loss, model
from yafsdp_fn import optim
from yafsdp_fn.optim import rates

F64 = ya.Precision(*[torch.float64] * 3)
STEPS = 5

TXS: dict[str, Any] = {
    "momentum": optim.sgd(0.1, momentum=0.9),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "scale by a number": optim.chain(optim.scale(0.3), optim.sgd(0.1)),
    "scale by a rate": optim.chain(optim.scale_by_schedule(lambda count: 0.5 ** (count + 1)), optim.sgd(0.1)),
    "warm-up and cosine": optim.adamw(rates.warmup_cosine_decay_schedule(0.0, 0.05, 2, STEPS), weight_decay=0.1),
    "momentum, decayed, at a rate": optim.chain(
        optim.clip_by_global_norm(0.5),
        optim.add_decayed_weights(0.1, lambda path, param: len(param.shape) > 1),
        optim.sgd(lambda count: 0.1 / (count + 1), momentum=0.9),
    ),
}


def trained(mesh: Any, name: str) -> None:
    rank, ranks, tx = mesh.get_local_rank(), mesh.size(), TXS[name]
    state = ya.init(model(), tx, mesh=mesh, precision=F64)
    expected = ya.PlainState.create(optree.tree_map(torch.Tensor.double, plain(model())), tx)
    step, oracle = ya.train_step(loss, tx), ya.train_step(loss, tx)
    for number in range(STEPS):
        each = [batch(ranks * number + r) for r in range(ranks)]
        state, _ = step(state, each[rank])
        expected, _ = oracle(expected, joined(each))
    compare(ya.unshard(state.params), expected.params, 1e-12, "parameters")
    compare(ya.unshard(state.opt_state), expected.opt_state, 1e-12, "the optimizer's state")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", TXS)
def test_an_optimizer_trains_shards_as_it_trains_plain_trees(pools: dict[int, Pool], world: int, name: str) -> None:
    pools[world].run(trained, name)
