"""ya.planner.plan: what a training step of a user's own model will take, before any machine is rented. Needs torch."""

from collections.abc import Callable
from typing import Any, Literal

import optree
from torch import Tensor

from yafsdp_fn.api.step_function import StepFunction, default_schedule
from yafsdp_fn.optim import GradientTransformation
from yafsdp_fn.params.precision import DEFAULT_PRECISION, Precision
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.pipelines.assign import assign
from yafsdp_fn.pipelines.cut import cut
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.plan import Plan, axes, read_by
from yafsdp_fn.planner.trace import trace
from yafsdp_fn.program.measured import KERNELS
from yafsdp_fn.program.split import Assignment
from yafsdp_fn.schedules.builders import AnySchedule


def plan(
    loss_fn: Callable[..., Any],
    params: Tree,
    batch: Tree,
    *,
    tx: GradientTransformation,
    ranks: int,
    cluster: str | Cluster,
    precision: Precision = DEFAULT_PRECISION,
    schedule: AnySchedule = default_schedule,
    microbatches: int = 1,
    memory: int | None = None,
    stages: int | Assignment = 1,
    replicate: int | None = None,
    local: int | None = None,
    has_aux: bool = False,
    skip_nonfinite: bool = True,
    kernels: Literal["fused", "eager", "pieces"] = "fused",
    device: Literal["cuda", "cpu"] = "cuda",
    **inside: int,
) -> Plan:
    """Time and memory of a training step of `loss_fn` on `ranks` GPUs of `cluster`; nothing is computed or allocated.

    params: a tree of `Param` (or tensors); batch: one rank's, tensors of any device, meta for instance
    stages: of a pipeline, `ranks / stages` ranks each, that see the same batches, so that a step has that many fewer
        tokens; a number, for stages of about equal cost, or what `assign` made. The schedule is then one of pipelines
    replicate, local: the mesh, as `ya.mesh` takes them; the others as `ya.train_step` and `ya.init` take them
    memory: bytes that a rank may fill, by default the cluster's
    kernels: of norms, rotary positions, casts, losses and the optimizer: "fused", those that feed each other as one, as
        `torch.compile` or a library of kernels has them; "eager", each by itself; "pieces", and norms written out, as
        before torch 2.8
    device: whose kernels are counted, as `trace` takes it: "cpu" for a cluster that was calibrated on CPU ranks
    inside: axes inside blocks, as `ya.mesh` takes them: `tensor=8`, over which `loss_fn` is computed

    Raises ValueError for what cannot be: unknown clusters (with the nearest names), ranks that do not fill its nodes or
    the mesh, and programs that this step would not run. A plan that does not fit is a plan: see `Plan.fits`, and
    `Plan.check`, which raises.

    >>> plan = ya.planner.plan(loss_fn, params, batch, tx=tx, ranks=16, cluster="a100-80g")
    >>> plan.fits, plan.tokens
    (True, 512)
    """
    if kernels not in KERNELS:
        raise ValueError(f"plan: kernels={kernels!r}, expected one of {', '.join(KERNELS)}")
    both: dict[str, Any] = {"has_aux": has_aux, "microbatches": microbatches}
    count = stages if isinstance(stages, int) else stages.stages
    if count < 1 or ranks % count:
        raise ValueError(f"stages={count} does not divide {ranks} ranks")
    mesh = axes(ranks // count, replicate, local, **inside)
    more: dict[str, Any] = {"precision": precision, "skip_nonfinite": skip_nonfinite, "device": device, **both}
    found = trace(loss_fn, params, batch, tx=tx, mesh=mesh, **more)._replace(kernels=kernels)
    if count > 1:
        found = found.on((("stage", count), *mesh))
        found = cut(found, assign(found, count) if isinstance(stages, int) else stages)
    program = StepFunction(loss_fn, schedule=schedule, tx=tx, **both).programs.build(found).all_stages
    if program.trace is not found:  # one that was given may have no costs
        program = program.with_trace(found)
    tokens, unit = _counted(batch)
    return Plan.of(program, cluster, memory)._replace(tokens=tokens * read_by(found), unit=unit)


def _counted(batch: Tree) -> tuple[int, str]:
    """Counts a rank's batch, and says in what: tokens where all of its integers are [rows, length], else rows."""
    tensors = [leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    words = {leaf.shape for leaf in tensors if not leaf.is_floating_point() and leaf.ndim > 1}
    if len(words) == 1:
        (shape,) = words
        if len(shape) == 2:
            return shape.numel(), "tokens"
    rows = {leaf.shape[0] for leaf in tensors}
    return (rows.pop() if len(rows) == 1 else 0), "rows"
