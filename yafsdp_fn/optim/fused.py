"""torch's fused kernels as an implementation of some sequences of rules:

    scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
    [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
    [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_

One pass over parameters, gradients and moments; nothing of their size is allocated. The kernels divide gradients by
`grad_scale` (and write the quotient back), and do nothing when `found_inf` is 1, without the host knowing. A mask of
the decay cuts every leaf into views that decay and views that do not, and each kind is one call.

On the CPU the kernels now and then round the elements past the last full vector (16 in fp32) differently: in the last
place, the bits of an element may depend on where its shard is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.adamw import Adam, ScaleByAdamState
from yafsdp_fn.optim.base import GradientTransformation, State
from yafsdp_fn.optim.masking import Decay
from yafsdp_fn.optim.runs import mask_runs, split_runs
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.sgd import Trace
from yafsdp_fn.tree import Tree

Stage = tuple[GradientTransformation, State]
Leaves = list[Tensor]


class Fusion(NamedTuple):
    """A sequence of rules that one kernel does.

    moments: trees that it updates beside the parameters
    launch: `(params, grads, *moments, lr=, weight_decay=, grad_scale=, found_inf=)`, lists of tensors and scalars
    lossy: whether the kernel is wrong for 16-bit parameters on the CPU
    """

    moments: tuple[Tree, ...]
    launch: Callable[..., None]
    lossy: bool = False


def fused_step_(
    stages: Sequence[Stage],
    params: Tree,
    grads: Tree,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    on_write: Callable[[], None],
) -> bool:
    """Does the whole step in place and returns True, or touches nothing and returns False.

    grad_scale, found_inf: 0-dim, or None for 1 and 0; on_write: called before the first write
    """
    fusion = _recognise(stages)
    if fusion is None:
        return False
    spec = optree.tree_structure(params)
    columns: list[Any] = [spec.flatten_up_to(tree) for tree in (params, grads, *fusion.moments)]
    if not _suits(fusion, [columns[0], *columns[2:]]):
        return False
    device, dtype = columns[0][0].device, columns[0][0].dtype
    columns[1] = [grad.to(dtype).contiguous() for grad in columns[1]]  # autograd may return a transposed view

    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    decay = next((rule for rule in rules if isinstance(rule, Decay)), Decay(0.0))
    scale = next(rule for rule in rules if isinstance(rule, Scale))
    factor = scale.factor(states[-1])
    scalars = {
        "lr": -_fp32(factor, device) if isinstance(factor, Tensor) else -factor,
        "grad_scale": None if grad_scale is None else _fp32(grad_scale, device),
        "found_inf": None if found_inf is None else _fp32(found_inf, device),
    }
    parts = list(_by_decay(decay, params, columns))
    on_write()
    for weight_decay, part in parts:
        fusion.launch(*part, weight_decay=weight_decay, maximize=False, **scalars)
    for state in states:
        if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
            state.count.add_(1 if found_inf is None else found_inf != 1)
    return True


def _recognise(stages: Sequence[Stage]) -> Fusion | None:
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as adam, Scale()] | [Adam() as adam, Decay(), Scale()]:
            return _adam(torch._fused_adamw_, adam, states[0])
        case [Decay(), Adam() as adam, Scale()]:
            return _adam(torch._fused_adam_, adam, states[1])
        case [Trace() as trace, Scale()] | [Decay(), Trace() as trace, Scale()] if trace.decay > 0:
            return _sgd((states[-2].trace,), trace.decay, trace.nesterov)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd((), 0.0, False)
    return None


def _adam(kernel: Callable[..., None], rule: Adam, state: ScaleByAdamState) -> Fusion:
    step = (state.count + 1).float()

    def launch(params: Leaves, grads: Leaves, mu: Leaves, nu: Leaves, **scalars: Any) -> None:
        steps = [step] * len(params)
        betas = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps}
        kernel(params, grads, mu, nu, [], steps, amsgrad=False, **betas, **scalars)

    return Fusion((state.mu, state.nu), launch)


def _sgd(moments: tuple[Tree, ...], momentum: float, nesterov: bool) -> Fusion:
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
    return Fusion(moments, launch, lossy=True)


def _suits(fusion: Fusion, columns: Sequence[Leaves]) -> bool:
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


def _by_decay(decay: Decay, params: Tree, columns: Sequence[Leaves]) -> Iterator[tuple[float, list[Leaves]]]:
    """`(weight decay, columns)` of everything that decays alike."""
    if decay.mask is None:
        parts = [(decay.weight_decay, list(columns))]
    else:
        runs = mask_runs(decay.mask, params)
        chosen, others = zip(*(split_runs(column, runs) for column in columns), strict=True)
        parts = [(decay.weight_decay, list(chosen)), (0.0, list(others))]
    for weight_decay, part in parts:
        # the CUDA kernels refuse a list that ends in an empty tensor
        full = [[leaf for leaf in column if leaf.numel()] for column in part]
        if full[0]:
            yield weight_decay, full


def _fp32(value: Tensor, device: torch.device) -> Tensor:
    """The CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32)
