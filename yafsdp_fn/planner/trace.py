"""ya.planner.trace: the visits of a loss and what they cost, from abstract parameters: no ranks, no memory, any mesh.

    trace = ya.planner.trace(llama.loss(config), llama.params(config), batch, ranks=16384)
    program = ya.schedules.zero3()(trace)

It is what `train_step(...).trace(state, batch)` gives for a state on such a mesh.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import optree

from yafsdp_fn.api.step_function import StepFunction, default_schedule
from yafsdp_fn.optim.in_format import block_of
from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.precision import DEFAULT_PRECISION, Precision, must_be_precision
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.params.tree_layout import tree_layout
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.tracing.gpu_allocations import GpuAllocations
from yafsdp_fn.tracing.optimizer_memory import with_optimizer
from yafsdp_fn.tracing.tracer import trace_abstract
from yafsdp_fn.util.mesh_axes import SHARD, MeshAxes
from yafsdp_fn.util.torch_private import without_driver


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

    Attention is counted by a rule of its own (`tracing/attention.py`). Raises TypeError for params without leaves,
    ValueError for a mesh that cannot be, and RuntimeError for a loss that needs the values of tensors.

    >>> trace = ya.planner.trace(loss_fn, params, batch, ranks=64)
    >>> trace.mesh, [visit.name for visit in trace.visits]
    ((('shard', 64),), ['embed', 'layers[0]', 'layers[1]', 'layers[2]', 'layers[3]', 'head'])
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"trace: device={device!r}, expected 'cuda' or 'cpu'")
    must_be_precision(precision)
    step = StepFunction(loss_fn, has_aux, default_schedule, microbatches, tx=tx)
    axes = _axes(ranks, mesh)
    layout = _layout(params, tx)
    with GpuAllocations() if device == "cuda" else nullcontext():
        found, placement = trace_abstract(loss_fn, layout, axes, precision, batch, microbatches, has_aux)
    return with_optimizer(step.programs.complete(found, placement), tx, skip_nonfinite, placement)


def _axes(ranks: int, mesh: Sequence[tuple[str, int]] | None) -> MeshAxes:
    if mesh is None:
        return ((SHARD, ranks),)
    if ranks != 1 or isinstance(mesh, int):
        raise TypeError(
            f"trace: ranks={ranks}, mesh={mesh!r}: expected a number of ranks, such as ranks=32, or a mesh of "
            '(axis, size) pairs, such as mesh=(("replicate", 4), ("shard", 8))'
        )
    return tuple((name, size) for name, size in mesh)


def _layout(params: Tree, tx: Any) -> TreeLayout:
    if handles(params):
        raise TypeError("trace: these are a state's sharded params; give the tree that ya.init or ya.shard was given")
    if not optree.tree_leaves(params):
        raise TypeError("trace: params has no leaves; expected a tree of ya.Param, such as llama.params(config)")
    return tree_layout(params)[0].aligned(block_of(tx))
