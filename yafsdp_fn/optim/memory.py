"""What memory an optimizer takes, found by running it on fake shards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from yafsdp_fn.comm.places import places
from yafsdp_fn.layout import TreeLayout
from yafsdp_fn.mesh import SHARD
from yafsdp_fn.optim.base import check
from yafsdp_fn.optim.step import step_
from yafsdp_fn.precision import Precision
from yafsdp_fn.runtime.abstract import AbstractStore
from yafsdp_fn.runtime.lives import Lives
from yafsdp_fn.schedules.trace import Optimizer
from yafsdp_fn.sharded import Sharded, is_sharded, trainable


def memory_of(
    tx: Any, layout: TreeLayout, precision: Precision, skip_nonfinite: bool, device: torch.device
) -> Optimizer:
    """The memory of `tx` on a state of `layout` on `device`: of its state, and of a step of it.

    An update that reads the values of tensors has no step here: it counts as one that allocates nothing.
    """
    store = AbstractStore(layout, ((SHARD, 1),), precision, places(((SHARD, 1),), device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, grads = (trainable(store.handles(store.shards(device))) for _ in range(2))
        state = check(tx, params).init(params)
        fixed, shards = _spread(state)
        known: Any = (params, grads, state)
        leaves: list[Any] = optree.tree_leaves(known)
        lives = Lives(leaf for leaf in leaves if isinstance(leaf, Tensor))
        one = torch.ones((), device=device)
        try:
            with lives:
                step_(tx, params, grads, state, scale=one, found_inf=one if skip_nonfinite else None, grad_norm=one)
        except (DataDependentOutputException, DynamicOutputShapeException):
            lives.peak = 0
    updated = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    return Optimizer(fixed, shards, (lives.peak, max(updated, 1)))


def _spread(state: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """`Optimizer.fixed` and `Optimizer.shards`."""
    fixed, shards = 0, Counter[int]()
    for node in optree.tree_leaves(state, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            for _, group, leaf in node.group_leaves():
                shards[group.layout.numel] += leaf.nbytes // leaf.shape[-1]
        elif isinstance(node, Tensor):
            fixed += node.nbytes
    return fixed, tuple(sorted(shards.items()))
