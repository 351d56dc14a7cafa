"""Traces a call on fake tensors: the visits, and what each costs, with nothing computed and nothing gathered.

A `Tracer` stands where a session would: visits reach it through the parameters. One body is run per signature (block,
layouts, argument shapes), so the cost of tracing a scan does not grow with its depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules.trace import Trace, Visit, chained_order
from yafsdp_fn.sharded import Context, Sharded
from yafsdp_fn.tree import Tree

if TYPE_CHECKING:
    from yafsdp_fn.runtime.call import Call
    from yafsdp_fn.runtime.steps import Arguments


class Tracer:
    """A session that only looks."""

    closed = False

    def __init__(self, store: Store, mode: FakeTensorMode) -> None:
        self.store, self.mode = store, mode
        self.visits: list[Visit] = []
        self._seen: dict[Any, tuple[Call, list[Tensor], Visit]] = {}
        with mode:
            self.leaves = [
                torch.empty(m.shape, dtype=m.dtype, device=m.device, requires_grad=group.trainable)
                for group, m in zip(store.groups, store.masters(), strict=True)
            ]

    def handle(self, node: Sharded) -> Sharded:
        old = node.context
        leaves = tuple(self.leaves[k] for k, _, _ in node.group_leaves())
        return Sharded(leaves, Context(old.entry, self.store, old.first_group, session=self))

    def visit(self, call: Call) -> Tree:
        """Records a visit; visits without grad are not part of a program."""
        track = torch.is_grad_enabled()
        trained = tuple(unit for unit in call.units if track and self.store.units[unit].trainable)
        shapes = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in call.tensors)
        layouts = tuple((call.of_unit[unit][0].layout, unit in trained) for unit in call.units)
        key = (call.signature, shapes, layouts, track)
        if key not in self._seen:
            self._seen[key] = self._measure(call, trained, track)
        first, outs, cost = self._seen[key]
        call.like(first)
        if track:
            record = Visit(len(self.visits), call.name, call.units, trained, *cost[4:])
            self.visits.append(record)
        fresh = [torch.empty_like(out) for out in outs]
        return call.outputs([x.requires_grad_(track and x.is_floating_point()) for x in fresh])

    def _measure(self, call: Call, trained: tuple[int, ...], track: bool) -> tuple[Call, list[Tensor], Visit]:
        store = self.store
        weights = [
            [
                torch.empty(
                    shape, dtype=store.gather_dtype(unit), device=store.comms.device, requires_grad=unit in trained
                )
                for shape in call.of_unit[unit][0].layout.shapes
            ]
            for unit in call.units
        ]
        inputs = [x.detach().requires_grad_(track and x.requires_grad) for x in call.tensors]
        leaves = [leaf for unit in weights for leaf in unit]
        kept: dict[int, int] = {leaf.untyped_storage()._cdata: 0 for leaf in leaves}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept.setdefault(storage._cdata, storage.nbytes())
            return tensor

        forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outs = call.run(weights, inputs)
        roots = [out for out in outs if out.requires_grad]
        wanted = [x for x in (*inputs, *leaves) if x.requires_grad]
        if roots and wanted:
            with backward:
                torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
        carry = sum(x.numel() * x.element_size() for x in call.tensors)
        cost = Visit(
            0, "", (), (), forward.get_total_flops(), backward.get_total_flops(), sum(kept.values()) * track, carry
        )
        return call, [out.detach() for out in outs], cost


def trace_call(arguments: Arguments, store: Store) -> Trace:
    """The trace of one call of a loss on `store`. Raises RuntimeError where the loss needs the values of tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(store, mode)
    try:
        with mode, torch.enable_grad():
            arguments.call(0, tracer, True)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"the loss depends on the values of tensors ({error}), which fake tensors do not have: "
            "run one step, then lower"
        ) from error
    visits = tuple(tracer.visits)
    return Trace(store.units, visits, chained_order(visits, arguments.parts), store.mesh_axes, arguments.parts)
