"""ya.planner.trace: a loss, from abstract parameters, without ranks or memory, on any mesh."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from yafsdp_fn.api.step_function import StepFunction, default_schedule, pair_of
from yafsdp_fn.communication.ranks import Ranks, absent_ranks
from yafsdp_fn.nn.cross_entropy import linear_cross_entropy, rows_at_once
from yafsdp_fn.optim.in_format import block_of
from yafsdp_fn.params.precision import DEFAULT_PRECISION, Precision
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime.arguments import Arguments
from yafsdp_fn.runtime.operation_costs import in_pieces
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.tracer import trace_call
from yafsdp_fn.util.mesh_axes import SHARD
from yafsdp_fn.util.torch_private import transforms_active, without_driver

# ---- Imitates, on the CPU's fake tensors, the allocations of GPU kernels.
#
# RMSNorm                 one kernel, which saves x and one fp32 scale per row; the CPU's pieces save three copies of x
# in                         fp32 if x is narrower
# linear_cross_entropy    takes more rows at a time


class GpuAllocations(TorchFunctionMode):
    """Makes `rms_norm` with a weight and `linear_cross_entropy` allocate as on a GPU, while active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear_cross_entropy and kwargs["chunk"] is None:
            return func(*args, **kwargs | {"chunk": rows_at_once(*args[:2], device="cuda")})
        if func in (F.rms_norm, torch.rms_norm) and not transforms_active():
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is None:
        return F.rms_norm(input, normalized_shape, weight, eps)
    out: Tensor = _RmsNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return out


RMS_NORM = (34, 64)
"""Bytes an element of bf16 that RMSNorm in pieces moves beyond one kernel, in forward and backward: a cast to fp32,
squares, their mean, a product, a cast back, the gain; and the same from behind (`Moved.pieces`)."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[: x.ndim - weight.ndim]
        scale = x.new_empty(*rows, *[1] * weight.ndim, dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        in_pieces(x.numel() * RMS_NORM[0], kernels=6)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        in_pieces(x.numel() * RMS_NORM[1], kernels=13)
        return x + grad, torch.empty_like(weight)


# ---- ya.planner.trace: the visits of a loss and what they cost, from abstract parameters: no ranks, no memory, any
# mesh.
#
#     trace = ya.planner.trace(llama.loss(config), llama.params(config), batch, ranks=16384)
#     program = ya.schedules.zero3()(trace)
#
# It is what `train_step(...).trace(state, batch)` gives for a state on such a mesh.


@without_driver()
def trace(
    loss_fn: Callable[[Tree, Tree], Any],
    params: Tree,
    batch: Tree,
    *,
    ranks: int = 1,
    mesh: Sequence[tuple[str, int]] | None = None,
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
    ranks: that one copy of the state is cut over, which need not exist; mesh: instead,
        `(axis name, size)` pairs as `ya.mesh` makes them, outermost first
    tx, skip_nonfinite: of the step, which decide when a program may update, and what memory the optimizer takes
    loss_fn, precision, microbatches, has_aux: as for `train_step` and `init`
    device: the type that the step is for. Tensors are the CPU's, so that this process may still `launch`, and a plan is
        the same on every machine; for "cuda" there are rules for RMSNorm, which saves much less on a GPU, and for
        `linear_cross_entropy`. Other ops are taken to be alike

    Attention is counted by a rule of its own (`tracing.attention`). Raises TypeError for params without leaves,
    ValueError for a mesh that cannot be, and RuntimeError for a loss that needs the values of tensors.

    >>> trace = ya.planner.trace(loss_fn, params, batch, ranks=64)
    >>> trace.mesh, [visit.name for visit in trace.visits]
    ((('shard', 64),), ['embed', 'layers[0]', 'layers[1]', 'layers[2]', 'layers[3]', 'head'])
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"trace: device={device!r}, expected 'cuda' or 'cpu'")
    step = StepFunction(loss_fn, has_aux, default_schedule, microbatches, tx=tx, skip_nonfinite=skip_nonfinite)
    placement = _placement(params, _axes(ranks, mesh), precision, tx)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = optree.tree_map(_fake, batch)
    fun = (lambda params, batch: pair_of(loss_fn(params, batch))[0]) if has_aux else loss_fn
    arguments = Arguments(fun, (placement.handles(placement.shards("meta")), fakes), {}, (0,), microbatches)
    with GpuAllocations() if device == "cuda" else nullcontext():
        found = trace_call(arguments, placement, mode)
    return step.programs.measured(found, placement)


def _axes(ranks: int, mesh: Sequence[tuple[str, int]] | None) -> tuple[tuple[str, int], ...]:
    if mesh is None:
        return ((SHARD, ranks),)
    if ranks != 1 or isinstance(mesh, int):
        raise TypeError(
            f"trace: ranks={ranks}, mesh={mesh!r}: expected a number of ranks, such as ranks=32, or a mesh of "
            '(axis, size) pairs, such as mesh=(("replicate", 4), ("shard", 8))'
        )
    return tuple((name, size) for name, size in mesh)


def _placement(params: Tree, axes: tuple[tuple[str, int], ...], precision: Precision, tx: Any) -> Placement[Ranks]:
    """The layout of `params` on a mesh of `axes`, which need not exist."""
    if handles(params):
        raise TypeError("trace: these are a state's sharded params; give the tree that ya.init or ya.shard was given")
    if not optree.tree_leaves(params):
        raise TypeError("trace: params has no leaves; expected a tree of ya.Param, such as llama.params(config)")
    return Placement(
        tree_layout(params)[0].aligned(block_of(tx)), axes, precision, absent_ranks(axes, torch.device("cpu"))
    )


def _fake(leaf: Any) -> Any:
    # with its strides: what is not contiguous is copied on its way
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
