"""torch's fused kernels as an implementation of some sequences of rules:

    scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
    [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
    [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_

One pass over parameters, gradients and moments; nothing of their size is allocated. The kernels divide gradients by
`grad_scale` (and write the quotient back), and do nothing when `found_inf` is 1, without the host knowing. A mask of
the decay cuts every leaf into views that decay and views that do not, and each kind is one call.

On the CPU the kernels now and then round the elements past the last full vector of a tensor differently: in the last
place, the bits of an element depend on where its shard is cut. Leaves are therefore cut into units (runs.py), whether
all units take the step at once or each when its gradient is complete (units.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.adamw import Adam, ScaleByAdamState
from yafsdp_fn.optim.base import GradientTransformation, State
from yafsdp_fn.optim.masking import Decay
from yafsdp_fn.optim.runs import leaf_runs, split_runs
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.sgd import Trace
from yafsdp_fn.tree import Tree

Stage = tuple[GradientTransformation, State]
Leaves = list[Tensor]
Columns = Sequence[Leaves]
"""Parameters, gradients and moments, and maybe copies of the parameters: lists of tensors of one order."""
LARGE = 1 << 22
"""Elements of a piece from which a launch of its own, of the kernel that writes copies, costs less than it saves."""
Launch = Callable[[float, Columns, Tensor | None, Tensor | None], None]
"""`(weight decay, columns, grad_scale, found_inf)`: one call of the kernel."""


class Fusion(NamedTuple):
    """A sequence of rules that one kernel does.

    stages: its rules and their states; moments: trees that it updates beside the parameters
    kernel: reads the counts and gives `(params, grads, *moments, lr=, weight_decay=, grad_scale=, found_inf=)`
    lossy: whether the kernel is wrong for 16-bit parameters on the CPU
    copying: like `kernel`, on columns with copies; its launch gives back what it leaves to the other, None: everything
    """

    stages: Sequence[Stage]
    moments: tuple[Tree, ...]
    kernel: Callable[[], Callable[..., None]]
    lossy: bool = False
    copying: Callable[[], Callable[..., Columns] | None] = lambda: None

    @property
    def decay(self) -> Decay:
        return next((tx.rule for tx, _ in self.stages if isinstance(tx.rule, Decay)), Decay(0.0))

    def columns(self, params: Tree, grads: Tree, copies: Tree | None = None) -> list[Leaves] | None:
        """The leaves of parameters, gradients, moments and copies, or None if the kernel does not take them."""
        spec = optree.tree_structure(params)
        columns: list[Leaves] = [spec.flatten_up_to(tree) for tree in (params, grads, *self.moments)]  # type: ignore[misc]
        if not _suits(self, [columns[0], *columns[2:]]):
            return None
        return columns if copies is None else [*columns, spec.flatten_up_to(copies)]  # type: ignore[list-item]

    def begin(self) -> Launch:
        """A step's kernel. What depends on counts is worked out here, before any part of the step."""
        kernel, width = self.kernel(), 2 + len(self.moments)
        copying = self.copying()
        scale, state = self.stages[-1][0].rule, self.stages[-1][1]
        assert isinstance(scale, Scale)
        factor = scale.factor(state)
        lr = -factor.float() if isinstance(factor, Tensor) else -factor

        def launch(weight_decay: float, columns: Columns, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
            device = columns[0][0].device
            scalars = {
                "lr": _fp32(lr, device),
                "weight_decay": weight_decay,
                "grad_scale": _fp32(grad_scale, device),
                "found_inf": _fp32(found_inf, device),
            }
            if copying is not None and len(columns) > width:
                columns = copying(columns, **scalars)
            if columns[0]:
                kernel(*columns[:width], **scalars, maximize=False)
                follow(columns[0], *columns[width:])

        return launch

    def advance(self, found_inf: Tensor | None) -> None:
        """Counts the step, unless it is skipped."""
        for _, state in self.stages:
            if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
                state.count.add_(1 if found_inf is None else found_inf != 1)


def fused_step_(
    stages: Sequence[Stage],
    params: Tree,
    grads: Tree,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    on_write: Callable[[], None],
    copies: Tree | None = None,
) -> bool:
    """Does the whole step in place and returns True, or touches nothing and returns False.

    grad_scale, found_inf: 0-dim, or None for 1 and 0; on_write: called before the first write
    copies: of the parameters in another dtype, which follow them
    """
    fusion = recognise(stages)
    columns = None if fusion is None else fusion.columns(params, grads, copies)
    if fusion is None or columns is None:
        return False
    columns[1] = [as_read(grad, columns[0][0].dtype) for grad in columns[1]]
    launch = fusion.begin()
    decaying: list[list[Tensor]] = []
    others: list[list[Tensor]] = []
    for runs, leaves in zip(leaf_runs(fusion.decay.mask, params), zip(*columns, strict=True), strict=True):
        pieces = zip(*(split_runs(leaf, runs) for leaf in leaves), strict=True)
        for (decays, _), piece in zip(runs, pieces, strict=True):
            (decaying if decays else others).append(list(piece))
    on_write()
    launch_pieces(launch, fusion.decay.weight_decay, decaying, grad_scale, found_inf)
    launch_pieces(launch, 0.0, others, grad_scale, found_inf)
    fusion.advance(found_inf)
    return True


def launch_pieces(
    launch: Launch,
    weight_decay: float,
    pieces: Sequence[Sequence[Tensor]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One call for all of `pieces`, each a `(param, grad, *moments, [copy])`. The CUDA kernels refuse empty tensors."""
    full = [piece for piece in pieces if piece[0].numel()]
    if full:
        launch(weight_decay, [list(column) for column in zip(*full, strict=True)], grad_scale, found_inf)


def follow(params: Leaves, copies: Leaves | None = None) -> None:
    """Copies take the values of `params`, cast."""
    if copies:
        torch._foreach_copy_(copies, params)


def as_read(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` as the kernels read it: in the parameters' dtype, contiguous (autograd may return a transposed view)."""
    return grad.to(dtype).contiguous()


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """The kernel for these rules, if there is one."""
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as adam, Scale()] | [Adam() as adam, Decay(), Scale()]:
            return _adam(torch._fused_adamw_, stages, adam, states[0], decoupled=True)
        case [Decay(), Adam() as adam, Scale()]:
            return _adam(torch._fused_adam_, stages, adam, states[1], decoupled=False)
        case [Trace() as trace, Scale()] | [Decay(), Trace() as trace, Scale()] if trace.decay > 0:
            return _sgd(stages, (states[-2].trace,), trace.decay, trace.nesterov)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(stages, (), 0.0, False)
    return None


def _adam(
    kernel: Callable[..., None], stages: Sequence[Stage], rule: Adam, state: ScaleByAdamState, *, decoupled: bool
) -> Fusion:
    betas = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps}

    def begin() -> Callable[..., None]:
        step = (state.count + 1).float()

        def launch(params: Leaves, grads: Leaves, mu: Leaves, nu: Leaves, **scalars: Any) -> None:
            steps = [step] * len(params)
            kernel(params, grads, mu, nu, [], steps, amsgrad=False, **betas, **scalars)

        return launch

    def copying() -> Callable[..., Columns] | None:
        step = (state.count + 1).float()
        kernel = copying_kernel(step.device)
        if kernel is None:
            return None
        corrections = 1 - torch.pow(rule.b1, step), (1 - torch.pow(rule.b2, step)).sqrt()

        def launch(columns: Columns, *, lr: Any, weight_decay: float, grad_scale: Any, found_inf: Any) -> Columns:
            rows = list(zip(*columns, strict=True))
            large = [row for row in rows if row[0].numel() >= LARGE and row[0].dtype == torch.float32]
            left = [row for row in rows if row[0].numel() < LARGE or row[0].dtype != torch.float32]
            if large:
                given = (lr, 1.0 if grad_scale is None else grad_scale, 0.0 if found_inf is None else found_inf)
                # `full_like`: to copy a number from the host could make it wait
                known = [x if isinstance(x, Tensor) else torch.full_like(step, x) for x in given]
                scalars = torch.stack([*known, *corrections])
                for row in large:
                    kernel(*row, scalars, weight_decay=weight_decay, decoupled=decoupled, **betas)
            return [list(column) for column in zip(*left, strict=True)] or [[] for _ in columns]

        return launch

    return Fusion(stages, (state.mu, state.nu), begin, copying=copying)


def copying_kernel(device: torch.device) -> Callable[..., None] | None:
    """A kernel that takes a step and writes the copies in one pass, where there is one."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from yafsdp_fn.optim import kernels  # triton takes a second to import

    return kernels.adam_copying


def _sgd(stages: Sequence[Stage], moments: tuple[Tree, ...], momentum: float, nesterov: bool) -> Fusion:
    def launch(params: Leaves, grads: Leaves, trace: Leaves | None = None, **scalars: Any) -> None:
        torch._fused_sgd_(
            params,
            grads,
            trace or [],
            momentum=momentum,
            nesterov=nesterov,
            dampening=0.0,
            is_first_step=False,
            **scalars,
        )

    # in torch 2.13 it leaves all but the last few elements as they are (pytorch issue 191763)
    return Fusion(stages, moments, lambda: launch, lossy=True)


def _suits(fusion: Fusion, columns: Columns) -> bool:
    """Whether the kernel takes these parameters and moments: it reads raw memory, of one dtype, in one order."""
    leaves = [leaf for column in columns for leaf in column]
    if not leaves or len({(leaf.device, leaf.dtype) for leaf in leaves}) != 1:
        return False
    kind, half = leaves[0].device.type, leaves[0].element_size() < 4
    return (
        (kind == "cuda" or (kind == "cpu" and not (half and fusion.lossy)))
        and all(leaf.is_contiguous() for leaf in leaves)
        and all(leaf.shape == row[0].shape for row in zip(*columns, strict=True) for leaf in row)
    )


def _fp32(value: Any, device: torch.device) -> Any:
    """The CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32) if isinstance(value, Tensor) else value
