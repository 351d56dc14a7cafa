"""Measures, on fake tensors, the memory of an optimizer, and the computation of owners of whole leaves."""

import math
from collections import Counter
from contextlib import suppress
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from yafsdp_fn.communication.ranks import absent_ranks
from yafsdp_fn.optim.base import as_transformation, checked_update
from yafsdp_fn.optim.in_format import block_of
from yafsdp_fn.optim.leafwise import Leafwise, plan
from yafsdp_fn.optim.step.analysis import leafwise_lanes
from yafsdp_fn.optim.step.units import UnitSteps
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.precision import Precision
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded, trainable
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.measured import OptimizerMemory
from yafsdp_fn.program.ops import Update
from yafsdp_fn.program.program import after_program
from yafsdp_fn.program.trace import Lent
from yafsdp_fn.runtime.measuring import LiveBytes
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.util.mesh_axes import SHARD
from yafsdp_fn.util.owners import Leaf
from yafsdp_fn.util.torch_private import FAKE_HAS_NO_VALUE, FUSED_IN_PLACE

# ---- State and step of an optimizer, on fake tensors.


def optimizer_memory(
    tx: Any, layout: TreeLayout, precision: Precision, skip_nonfinite: bool, device: torch.device
) -> OptimizerMemory:
    """Returns the memory of `tx` for a state of `layout` on `device`: of its state, and of a step.

    An update that reads the values of tensors cannot run here: it counts as one that allocates nothing.
    """
    placement = Placement(layout, ((SHARD, 1),), precision, absent_ranks(((SHARD, 1),), device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, grads = (trainable(placement.handles(placement.shards(device))) for _ in range(2))
        state = as_transformation(tx).init(params)
        # a step, on what is there already
        trees: Any = params, grads, state
        lives = LiveBytes(tensors_in(trees))
        one = torch.ones((), device=device)
        try:
            with InPlace(), lives:  # type: ignore[no-untyped-call]
                steps = UnitSteps(tx, params, grads, state)
                scalars: dict[str, Any] = {"scale": one, "found_inf": one if skip_nonfinite else None, "grad_norm": one}
                for op in after_program(placement.trained, [Lent(*of) for of in steps.parts.items()]):
                    if isinstance(op, Update):
                        steps.run(op.units if steps.parts else None, part=op.part if steps.parts else None, **scalars)
                steps.finish(scalars["found_inf"])
        except FAKE_HAS_NO_VALUE:
            lives.peak = 0
    # multi-phase updates have a few units under way at a time
    updated = [placement.layout_of(unit).numel for unit in steps.parts or placement.trained]
    block = block_of(tx)
    elements = max(updated, default=0) if steps.parts or block > 1 else sum(updated)
    fixed, shards, on_host = _spread(state, layout, block)
    return OptimizerMemory(fixed, shards, (lives.peak, max(elements, 1)), block, on_host)


class InPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces fused kernels on fake tensors, which write in place and return nothing. With a learning rate in a tensor
    they have no such implementation, and torch would run them on real zeros, as large as the parameters."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)  # operators of higher order have none
        return None if packet in FUSED_IN_PLACE else func(*args, **(kwargs or {}))


def _spread(
    state: Any, layout: TreeLayout, block: int
) -> tuple[int, tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Returns `fixed`, `shards` and `on_host` of `OptimizerMemory`. layout: on the mesh, of this rank's parts"""
    here = {group.units: group for _, group in layout.groups}
    fixed, shards, on_host = 0, Counter[tuple[int, int]](), Counter[int]()
    for node in optree.tree_leaves(state, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            for _, group, leaf in node.group_leaves():
                of = here[group.units]
                n = leaf.shape[-1] if group.encodes is None else group.encodes.format.numel(leaf.shape[-1])
                per_element = leaf.nbytes * block // n
                if group.on_host:
                    on_host.update(dict.fromkeys(group.held, per_element // len(group.held)))
                else:
                    shards[of.layout.numel, math.prod(size for _, size in of.axes)] += per_element
        elif isinstance(node, Tensor):
            fixed += node.nbytes
    spread = tuple((numel, nbytes, parts) for (numel, parts), nbytes in sorted(shards.items()))
    return fixed, spread, tuple(sorted(on_host.items()))


# ---- Leaves that are lent.


def measured_leaves(tx: Any, lent: tuple[Lent, ...], placement: Placement[Any]) -> tuple[Lent, ...]:
    """Adds to `lent` the bytes of each leaf that travel, and its owner's FLOPs: counted on fake leaves."""
    if not lent:
        return ()
    # by unit and offset; of a leaf that several rules update, the larger message and the sum of FLOPs
    leaves: dict[int, dict[int, tuple[int, tuple[int, ...], int, int]]] = {of.unit: {} for of in lent}
    params = trainable(placement.handles(placement.shards("meta")))
    lanes = leafwise_lanes(tx, params)
    for rule, own in [(rule, own) for rules, own in lanes for rule in rules]:
        for of_group in plan(rule, handles(own)).values():
            measured = [_measured(rule, leaf, placement) for leaf in of_group.leaves]
            for unit in of_group.owners:
                for leaf, (nbytes, flops) in zip(of_group.leaves, measured, strict=True):
                    _, _, earlier, before = leaves[unit].get(leaf.offset, (0, (), 0, 0))
                    leaves[unit][leaf.offset] = (leaf.offset, leaf.shape, max(earlier, nbytes), before + flops)
    return tuple(of._replace(leaves=tuple(leaves[of.unit][at] for at in sorted(leaves[of.unit]))) for of in lent)


def _measured(rule: Leafwise, leaf: Leaf, placement: Placement[Any]) -> tuple[int, int]:
    """Returns the bytes of a whole leaf that would travel one way, and the FLOPs of its update."""
    device, param = placement.comms.device, placement.precision.param
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = torch.zeros(leaf.shape, dtype=param, device=device)
        updates = weights.to(rule.dtype(device) or param)
        state = rule.inner.init(weights)
        with FlopCounterMode(display=False) as counter, suppress(*FAKE_HAS_NO_VALUE):
            checked_update(rule.inner, updates, state, weights if rule.params else None)
    travels = [updates, *optree.tree_leaves(state), *[weights] * rule.params]
    return sum(tensor.nbytes for tensor in travels), counter.get_total_flops()
