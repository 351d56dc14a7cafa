"""ya.trace: the visits of a loss and what they cost, from abstract parameters: no ranks, no memory, any mesh.

    trace = ya.trace(llama.loss(config), llama.params(config), {"tokens": tokens, "targets": tokens}, mesh=16384)
    program = ya.schedules.zero3()(trace)

It is what `train_step(...).trace(state, batch)` gives for a state on such a mesh.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.comm.ranks import SHARD, Ranks, absent_ranks
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.engine.steps import Arguments
from yafsdp_fn.params.grouping import tree_layout
from yafsdp_fn.params.precision import DEFAULT_PRECISION, Precision
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.reductions import Mean
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.step_function import DEFAULT, StepFunction
from yafsdp_fn.tracing.gpu_kernels import AsOnGpu
from yafsdp_fn.tracing.tracer import trace_call

Mesh = int | Sequence[tuple[str, int]]
"""Ranks that one copy of the state is cut over; or `(axis name, size)` pairs, outermost first, as in `Trace.mesh`."""


def trace(
    loss_fn: Callable[[Tree, Tree], Any],
    params: Tree,
    batch: Tree,
    *,
    mesh: Mesh = 1,
    precision: Precision = DEFAULT_PRECISION,
    microbatches: int = 1,
    tx: Any = None,
    skip_nonfinite: bool = True,
    has_aux: bool = False,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Trace:
    """The trace of a step of `loss_fn`, on fake tensors: nothing is allocated, drawn or computed.

    params: a tree of `Param`, tensors or `Lazy` leaves, as `ya.init` and `ya.shard` take
    batch: of one rank, over all microbatches; tensors may be on the meta device
    mesh: the ranks, which need not exist; axes as `ya.mesh` makes them
    tx, skip_nonfinite: of the step, which decide when a program may update, and what memory the optimizer takes
    loss_fn, precision, microbatches, has_aux: as for `train_step` and `init`
    device: the type that the step is for. Without a GPU, "cuda" is the CPU's fake tensors with rules for RMSNorm, which
        saves much less there, and for `linear_cross_entropy` (`tracing.gpu_kernels`); other ops are taken to be alike

    Attention is counted by a rule of its own (`tracing.attention`). Raises TypeError for params without leaves,
    ValueError for a mesh that cannot be, and RuntimeError for a loss that needs the values of tensors.
    """
    step = StepFunction(loss_fn, has_aux, DEFAULT, microbatches, tx=tx, skip_nonfinite=skip_nonfinite)
    placement = _placement(params, mesh, precision, device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = optree.tree_map(lambda x: _fake(x, placement.comms.device), batch)
    fun = _loss_alone(loss_fn) if has_aux else loss_fn
    arguments = Arguments(fun, (placement.handles(placement.shards("meta")), fakes), {}, (0,), microbatches)
    stands_in = device == "cuda" and placement.comms.device.type == "cpu"
    with AsOnGpu() if stands_in else nullcontext():
        found = trace_call(arguments, placement, mode)
    return step.complete(found, placement)


def _placement(params: Tree, mesh: Mesh, precision: Precision, wanted: str) -> Placement[Ranks]:
    """The layout of `params` on `mesh`, which need not exist."""
    axes = ((SHARD, mesh),) if isinstance(mesh, int) else tuple((name, size) for name, size in mesh)
    if handles(params):
        raise TypeError("trace: these are a state's sharded params; give the tree that ya.init or ya.shard was given")
    if not optree.tree_leaves(params):
        raise TypeError("trace: params has no leaves; expected a tree of ya.Param, such as llama.params(config)")
    if wanted not in ("cuda", "cpu"):
        raise ValueError(f"trace: device={wanted!r}, expected 'cuda' or 'cpu'")
    there = wanted == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu")
    return Placement(tree_layout(params)[0], axes, precision, absent_ranks(axes, device))


def _fake(leaf: Any, device: torch.device) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf


def _loss_alone(loss_fn: Callable[[Tree, Tree], Any]) -> Callable[[Tree, Tree], Any]:
    """`loss_fn` without its aux."""

    def alone(params: Tree, batch: Tree) -> Any:
        out = loss_fn(params, batch)
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Mean):
            raise TypeError(f"has_aux=True: the function must return (loss, aux), got {type(out).__name__}")
        return out[0]

    return alone
