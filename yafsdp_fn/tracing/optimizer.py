"""What memory an optimizer takes, found by running it on fake shards."""

from collections import Counter
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.comm.ranks import SHARD, absent_ranks
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.optim.base import check
from yafsdp_fn.optim.units import step_
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Sharded, is_sharded, trainable
from yafsdp_fn.schedules.measured import OptimizerMemory
from yafsdp_fn.torch_private import FAKE_HAS_NO_VALUE
from yafsdp_fn.tracing.allocations import Lives


def optimizer_memory(
    tx: Any, layout: TreeLayout, precision: Precision, skip_nonfinite: bool, device: torch.device
) -> OptimizerMemory:
    """The memory of `tx` on a state of `layout` on `device`: of its state, and of a step of it.

    An update that reads the values of tensors has no step here: it counts as one that allocates nothing.
    """
    placement = Placement(layout, ((SHARD, 1),), precision, absent_ranks(((SHARD, 1),), device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, grads = (trainable(placement.handles(placement.shards(device))) for _ in range(2))
        state = check(tx, params).init(params)
        trees: Any = params, grads, state
        lives = Lives(leaf for leaf in optree.tree_leaves(trees) if isinstance(leaf, Tensor))
        one = torch.ones((), device=device)
        try:
            with lives:
                step_(tx, params, grads, state, scale=one, found_inf=one if skip_nonfinite else None, grad_norm=one)
        except FAKE_HAS_NO_VALUE:
            lives.peak = 0
    updated = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    return OptimizerMemory(*_spread(state), (lives.peak, max(updated, 1)))


def _spread(state: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """`OptimizerMemory.fixed` and `OptimizerMemory.shards`."""
    fixed, shards = 0, Counter[int]()
    for node in optree.tree_leaves(state, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            for _, group, leaf in node.group_leaves():
                shards[group.layout.numel] += leaf.nbytes // leaf.shape[-1]
        elif isinstance(node, Tensor):
            fixed += node.nbytes
    return fixed, tuple(sorted(shards.items()))
