"""Measures, on fake tensors, the memory of an optimizer, and the computation of owners of whole leaves."""

from collections import Counter
from contextlib import suppress
from functools import cache, partial
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
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded, trainable
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.measured import OptimizerMemory
from yafsdp_fn.program.ops import Update
from yafsdp_fn.program.program import after_program
from yafsdp_fn.program.trace import Lent, Trace
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.tracing.body import LiveBytes
from yafsdp_fn.util.mesh_axes import SHARD, ranks_on
from yafsdp_fn.util.owners import Leaf
from yafsdp_fn.util.torch_private import FAKE_HAS_NO_VALUE, FUSED_IN_PLACE


def with_optimizer(trace: Trace, tx: Any, skips: bool, placement: Placement[Any]) -> Trace:
    """Adds to the trace of a step what its optimizer costs. Steps need not know, and do not run it on fake tensors.

    skips: the step may leave an update out
    """
    if tx is None:
        return trace
    return trace._replace(
        optimizer=optimizer_memory(tx, skips, placement), lent=measured_leaves(tx, trace.lent, placement)
    )


# ---- State and step of an optimizer, on fake tensors.


def optimizer_memory(tx: Any, skips: bool, like: Placement[Any]) -> OptimizerMemory:
    """Returns the memory of `tx` for a state that is placed `like` this, if one rank had all: of its state, and of a
    step.

    An update that reads the values of tensors cannot run here: it counts as one that allocates nothing.
    """
    axes = ((SHARD, 1),)
    device = like.comms.device
    placement = Placement(like.layout, axes, like.precision, absent_ranks(axes, device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = trainable(placement.handles(placement.shards(device)))
        grads = trainable(placement.handles(placement.shards(device)))
        state = as_transformation(tx).init(params)
        one = torch.ones((), device=device)
        trees: Any = params, grads, state
        lives = LiveBytes(tensors_in(trees))  # a step, on what is there already
        with InPlace(), lives:  # type: ignore[no-untyped-call]
            steps = UnitSteps(tx, params, grads, state)
            try:
                _run(steps, placement.trained, one, one if skips else None)
            except FAKE_HAS_NO_VALUE:
                lives.peak = 0
    # multi-phase updates have a few units under way at a time
    updated = [placement.layout_of(unit).numel for unit in steps.parts or placement.trained]
    block = block_of(tx)
    one_by_one = bool(steps.parts) or block > 1
    elements = max(updated, default=0) if one_by_one else sum(updated)
    fixed, shards, on_host = _spread(state, like.layout, block)
    return OptimizerMemory(fixed, shards, (lives.peak, max(elements, 1)), block, on_host)


def _run(steps: UnitSteps, trained: tuple[int, ...], one: Tensor, found_inf: Tensor | None) -> None:
    """Takes an optimizer's step as after a program without updates. one: for every scalar"""
    scalars: dict[str, Any] = {"scale": one, "found_inf": found_inf, "grad_norm": one}
    lent = [Lent(unit, parts) for unit, parts in steps.parts.items()]
    for op in after_program(trained, lent):
        if isinstance(op, Update) and lent:
            steps.run(op.units, part=op.part, **scalars)
        elif isinstance(op, Update):
            steps.run(None, part=None, **scalars)
    steps.finish(found_inf)


class InPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces fused kernels on fake tensors, which write in place and return nothing. With a learning rate in a tensor
    they have no such implementation, and torch would run them on real zeros, as large as the parameters."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)  # operators of higher order have none
        return None if packet in FUSED_IN_PLACE else func(*args, **(kwargs or {}))


Spread = tuple[int, tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]
"""`fixed`, `shards` and `on_host` of `OptimizerMemory`."""


def _spread(state: Any, layout: TreeLayout, block: int) -> Spread:
    """Returns where a state's bytes are. layout: on the mesh, of this rank's parts"""
    here = {group.units: group for group in layout.groups}
    fixed = 0
    shards = Counter[tuple[int, int]]()
    on_host = Counter[int]()
    for node in optree.tree_leaves(state, is_leaf=is_sharded):
        if isinstance(node, Tensor):
            fixed += node.nbytes
        if not isinstance(node, Sharded):
            continue
        for _, group, leaf in node.group_leaves():
            numel = leaf.shape[-1]
            if group.encodes is not None:
                numel = group.encodes.format.numel(numel)
            per_element = leaf.nbytes * block // numel
            if group.on_host:
                on_host.update(dict.fromkeys(group.held, per_element // len(group.held)))
                continue
            of = here[group.units]
            shards[of.layout.numel, ranks_on(of.axes)] += per_element
    spread = tuple((numel, nbytes, parts) for (numel, parts), nbytes in sorted(shards.items()))
    return fixed, spread, tuple(sorted(on_host.items()))


# ---- Leaves that are lent.


def measured_leaves(tx: Any, lent: tuple[Lent, ...], placement: Placement[Any]) -> tuple[Lent, ...]:
    """Adds to `lent` the bytes of each leaf that travel, and its owner's FLOPs: counted on fake leaves."""
    if not lent:
        return ()
    params = trainable(placement.meta_params())
    # unit -> offset -> leaf; of one that several rules update, the larger message and the sum of FLOPs
    found: dict[int, dict[int, tuple[int, tuple[int, ...], int, int]]] = {of.unit: {} for of in lent}
    for rules, own in leafwise_lanes(tx, params):
        for rule in rules:
            costs = cache(partial(_measured, rule, placement))
            for unit, of_unit in plan(rule, handles(own)).items():
                for leaf in of_unit.leaves:
                    nbytes, flops = costs(leaf)
                    _, _, most, before = found[unit].get(leaf.offset, (0, (), 0, 0))
                    found[unit][leaf.offset] = leaf.offset, leaf.shape, max(most, nbytes), before + flops
    return tuple(of._replace(leaves=tuple(sorted(found[of.unit].values()))) for of in lent)


def _measured(rule: Leafwise, placement: Placement[Any], leaf: Leaf) -> tuple[int, int]:
    """Returns the bytes of a whole leaf that would travel one way, and the FLOPs of its update."""
    device = placement.comms.device
    param = placement.precision.param
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = torch.zeros(leaf.shape, dtype=param, device=device)
        updates = weights.to(rule.dtype(device) or param)
        state = rule.inner.init(weights)
        with FlopCounterMode(display=False) as counter, suppress(*FAKE_HAS_NO_VALUE):
            checked_update(rule.inner, updates, state, weights if rule.params else None)
    travels = [updates, *optree.tree_leaves(state), *[weights] * rule.params]
    return sum(tensor.nbytes for tensor in travels), counter.get_total_flops()
