"""ya.chunk around blocks: the collectives of one microbatch, the gradients of several.

depth order    for each microbatch: all layers forward, all backward      microbatches=4
layer-major    for each layer: all microbatches                           ya.chunk(block, 4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, looped, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import (
    SCHEDULES,
    TX,
    Batch,
    Params,
    base_loss,
    base_params,
    dropout_block,
    embed,
    head,
)

N = 4
ROWS = 2 * N

Loss = Callable[[Any, Batch], ya.Mean]


def layer_major(layer: Callable[..., Any]) -> Loss:
    """`base_loss` with every block over N chunks of the batch."""

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(ya.chunk(embed, N, in_axes=(None, 0)), params.embed, batch["tokens"])
        x, _ = ya.scan(ya.chunk(layer, N, in_axes=(0, None)), x, params.layers)
        return ya.apply(ya.chunk(head, N, in_axes=(None, 0, 0)), params.head, x, batch["targets"])

    return loss


DROPPED = layer_major(dropout_block)


# ---- gradients


@on_ranks(1, 2)
def test_dropout_inside_chunks(mesh: Any) -> None:
    """Numbers are those of the plain loop, in kept and in recomputed visits, and differ between microbatches."""
    state = ya.init(base_params(3), TX, mesh=mesh)
    whole = ya.params.without_markers(plain(base_params(3)))
    batches = [batch_of(rank, rows=ROWS) for rank in range(mesh.size())]
    expected = looped(DROPPED, whole, batches)
    for schedule in ("zero3", "zero3-remat-all"):
        function = ya.value_and_grad(DROPPED, schedule=SCHEDULES[schedule])
        for _ in range(2):
            compare(function(state.params, batches[mesh.get_local_rank()]), expected, 1e-5, f"dropout, {schedule}")
    chunked, usual = (ya.train_step(loss, TX).lower(state, batches[0]) for loss in (DROPPED, base_loss))
    assert chunked.ops == usual.ops, "the collectives of one microbatch"
    ones = torch.ones(N, 64)
    seen: list[Tensor] = []

    def look(w: Any, x: Tensor) -> ya.Mean:
        dropped = ya.chunk(lambda w, x: torch.nn.functional.dropout(x, 0.5) * w.scale[0], N, in_axes=(None, 0))(w, x)
        seen.append(dropped.detach().ne(0))
        return ya.Mean(dropped.sum(), N)

    ya.value_and_grad(lambda params, x: ya.apply(look, params.head, x))(state.params, ones)
    assert len({tuple(row.tolist()) for row in seen[0]}) == N
