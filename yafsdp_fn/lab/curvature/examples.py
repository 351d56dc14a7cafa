"""Computes the norm of each example's own gradient: whole-model norms, of shards.

    for each rank in turn:                  # an example's gradient is sharded over all ranks
        for each row of its batch:
            gradient of that row's loss, where the other ranks' losses weigh nothing

An example is a row of the batch. Its share of the objective is its total over the mean weight of an example, so the
objective and its gradient are the means of their examples'.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.runtime.reductions import Mean, as_mean
from yafsdp_fn.transform import functional_loss, grad


def of_examples(loss: Callable[[Tree, Any], Any], params: Tree, batch: Tree) -> tuple[Tensor, Tensor]:
    """Computes `loss` on each of this rank's rows alone: totals [B] and weights [B], of one dtype."""
    totals, weights = torch.func.vmap(lambda row: _of_row(loss, params, row))(batch)
    return totals, weights


def mean_over_examples(params: Tree, values: Tensor) -> Tensor:
    """Averages one value per example, [B], over all ranks' examples; the same on every rank."""
    return functional_loss(lambda _: Mean(values.sum(), float(len(values))))(params)


def example_gradient_norms(loss: Callable[[Tree, Any], Any], params: Tree, batch: Tree, *, at_once: int = 1) -> Tensor:
    """Returns [B]: for each of this rank's examples the norm of its gradient, over all trained parameters of all ranks.

    batch: a tree of tensors [B, ...], with as many rows on every rank; `loss` also accepts a single row at_once:
    examples whose gradients are held together, each a tree like `params`; one pass's gathers serve them all

    Exact. A pass is of one rank's examples, while the others compute losses of no weight: on W ranks W times the work
    of the B examples. If the model fits on a rank, `ya.unshard` and torch.func.vmap avoid that. Raises RanksDisagree if
    ranks have different numbers of rows.
    """
    found, rows = handles(params), len(optree.tree_leaves(batch)[0])
    comms = found[0].owner.comms if found else None
    if isinstance(comms, Communicators):
        comms.must_agree("example_gradient_norms", {"rows of the batch": str(rows)})
    rank, ranks = (comms.batch_rank, comms.batch_ranks) if comms else (0, 1)

    def norm(row: Tree, counts: Tensor) -> Tensor:
        def total(p: Tree) -> Mean:
            return Mean(_of_row(loss, p, row)[0] * counts, counts)

        return global_norm(grad(total)(params))

    _, weights = of_examples(loss, params, batch)
    norms = torch.empty_like(weights)
    for turn in range(ranks):
        counts = torch.full((), float(turn == rank), device=weights.device)
        in_turn = torch.func.vmap(norm, (0, None), chunk_size=at_once)(batch, counts)
        norms = in_turn if turn == rank else norms
    return norms / mean_over_examples(params, weights)


def _of_row(loss: Callable[[Tree, Any], Any], params: Tree, row: Tree) -> tuple[Tensor, Tensor]:
    total, weight = as_mean(loss(params, optree.tree_map(lambda leaf: leaf[None], row)))
    return total, torch.as_tensor(weight).to(total.dtype)
