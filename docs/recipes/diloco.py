"""DiLoCo: workers that are far apart train alone for many steps, and meet seldom.

The idea (Douillard et al. 2023, arXiv 2311.08105): what a worker's parameters have moved in H steps of its own is taken
for a gradient. The mean of these over workers is one step of an outer optimizer, SGD with Nesterov's momentum. So
workers exchange a model in H steps instead of a gradient in each.

A worker may be many ranks: its state is sharded over a slice of the mesh that knows nothing of the others. Since shards
of equal places are equal parts, the mean over workers is one all-reduce of each shard.

    torchrun --nproc-per-node 2 docs/recipes/diloco.py          # 2 workers of 1 rank; on 8 ranks of 4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import torch
from tiny import LLAMA, TX, counting, say
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from models import llama

WORKERS, H = 2, 5
OUTER = ya.optim.sgd(0.7, momentum=0.9, nesterov=True)
PARAMS, loss_fn = llama.params(LLAMA), llama.loss(LLAMA)


def meet(state: Any, start: Any, outer: Any, mean: Callable[[Tensor], Tensor]) -> tuple[Any, Any, Any]:
    """The outer step, from `start`, the parameters that all workers began with. Returns state, start and outer state.

    mean: over workers, of a leaf
    """
    moved = optree.tree_map(lambda old, new: mean(old - new), start, state.params)
    updates, outer = OUTER.update(moved, outer, start)
    start = ya.optim.apply_updates(start, updates)
    own = optree.tree_map(torch.clone, start)  # the steps write over what they are given
    return dataclasses.replace(state, params=own), start, outer


def main(rounds: int = 6) -> list[float]:
    ranks = ya.mesh()  # starts the process group
    workers = min(WORKERS, ranks.size())
    grid = init_device_mesh(ranks.device_type, (workers, ranks.size() // workers), mesh_dim_names=("worker", "shard"))
    mesh, across, me = grid["shard"], grid.get_group("worker"), grid.get_local_rank("worker")

    def mean(leaf: Tensor) -> Tensor:
        torch.distributed.all_reduce(leaf, group=across)
        return leaf / workers

    state, step = ya.init(PARAMS, TX, mesh=mesh), ya.train_step(loss_fn, TX)  # all workers from the same bits
    start = optree.tree_map(torch.clone, state.params)
    outer, losses = OUTER.init(start), []
    for number in range(rounds):
        for inner in range(H):
            own = counting((number * H + inner) * workers + me)  # data of its own
            state, metrics = step(state, ya.shard_batch(own, mesh))
        losses.append(metrics["loss"].item())
        state, start, outer = meet(state, start, outer, mean)
    say(f"loss of the first worker {losses[0]:.3f} -> {losses[-1]:.3f} in {rounds} rounds of {H} steps")
    return losses


if __name__ == "__main__":
    main()
