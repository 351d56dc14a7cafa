"""torch's fused kernels as an implementation of some sequences of rules:

    scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
    [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
    [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_

One pass over parameters, gradients and moments; nothing of their size is allocated. The kernels divide gradients by
`grad_scale` (and write the quotient back), and do nothing when `found_inf` is 1, without the host knowing. A mask of
the decay cuts every leaf into views that decay and views that do not, and each kind is one call.

On CUDA, Adam's step of large units writes the parameters' working copies in the same pass (kernels.py), a launch for
every piece. A unit goes one way or the other by its own size, so bits do not depend on how units are grouped, cut or
dealt to ranks, and the launches of a model of small units stay as few as they are.

Why the bits of a step on the CPU do not depend on how many units take it at once: runs.py.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.adamw import Adam, ScaleByAdamState
from yafsdp_fn.optim.base import Scalar, Stage
from yafsdp_fn.optim.masking import Decay
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.sgd import Momentum
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.torch_private import foreach_copy, fused_adam, fused_adamw, fused_sgd

Leaves = list[Tensor]
Columns = Sequence[Leaves]
"""Parameters, gradients and moments, and maybe copies of the parameters: lists of tensors of one order."""
LARGE = 1 << 22
"""Elements of a unit, over all ranks, from which launches of its own, of the kernel that writes copies, cost less than
they save."""
Pieces = Sequence[Sequence[Tensor]]
"""Stretches of elements, each a `(param, grad, *moments, [copy])`."""
Launch = Callable[[float, bool, Pieces, Scalar, Scalar], None]
"""`(weight decay, large, pieces, grad_scale, found_inf)`: one call of the kernel for all pieces.

large: whether they are of large units: with copies, each may then have a launch of its own
"""


class Fusion(NamedTuple):
    """A sequence of rules that one kernel does.

    stages: its rules and their states; moments: trees that it updates beside the parameters
    kernels: reads the counts and gives `(params, grads, *moments, lr=, weight_decay=, grad_scale=, found_inf=)`, and
        one that takes copies too, for float32 parameters, where there is one
    lossy: whether the kernel is wrong for 16-bit parameters on the CPU
    """

    stages: Sequence[Stage]
    moments: tuple[Tree, ...]
    kernels: Callable[[], tuple[Callable[..., None], Callable[..., None] | None]]
    lossy: bool = False

    @property
    def decay(self) -> Decay:
        return next((tx.rule for tx, _ in self.stages if isinstance(tx.rule, Decay)), Decay(0.0))

    def columns(self, params: Tree, grads: Tree, copies: Tree | None) -> list[Leaves] | None:
        """The leaves of parameters, gradients, moments and copies, or None if the kernel does not take them.

        It reads raw memory of parameters and moments, of one dtype, in one order.
        """
        spec = optree.tree_structure(params)
        columns: list[Leaves] = [spec.flatten_up_to(tree) for tree in (params, grads, *self.moments)]  # type: ignore[misc]
        rows = list(zip(columns[0], *columns[2:], strict=True))
        if len({(leaf.device, leaf.dtype) for row in rows for leaf in row}) != 1:
            return None
        kind, half = columns[0][0].device.type, columns[0][0].element_size() < 4
        if kind not in ("cpu", "cuda") or (kind == "cpu" and half and self.lossy):
            return None
        if not all(leaf.is_contiguous() and leaf.shape == row[0].shape for row in rows for leaf in row):
            return None
        return columns if copies is None else [*columns, spec.flatten_up_to(copies)]  # type: ignore[list-item]

    def begin(self) -> Launch:
        """A step's kernel. What depends on counts is worked out here, before any part of the step."""
        (kernel, copying), width = self.kernels(), 2 + len(self.moments)
        scale, state = self.stages[-1][0].rule, self.stages[-1][1]
        assert isinstance(scale, Scale)
        lr = -(scale.by(state.count) if callable(scale.by) else scale.by)

        def launch(weight_decay: float, large: bool, pieces: Pieces, grad_scale: Scalar, found_inf: Scalar) -> None:
            full = [piece for piece in pieces if piece[0].numel()]  # the CUDA kernels refuse empty tensors
            if not full:
                return
            columns: Columns = [list(column) for column in zip(*full, strict=True)]
            device = columns[0][0].device
            if grad_scale is not None and columns[0][0].dtype == torch.float64:
                for grad in columns[1]:
                    grad.div_(grad_scale)  # the kernels read it in float32
                grad_scale = None
            scalars = {"grad_scale": _fp32(grad_scale, device), "found_inf": _fp32(found_inf, device)}
            scalars |= {"lr": lr if device.type == "cpu" else _fp32(lr, device), "weight_decay": weight_decay}
            if copying is not None and large and len(columns) > width and columns[0][0].dtype == torch.float32:
                copying(*columns, **scalars)
                return
            kernel(*columns[:width], **scalars, maximize=False)
            for copies in columns[width:]:
                foreach_copy(copies, columns[0])

        return launch

    def advance(self, found_inf: Scalar) -> None:
        """Counts the step, unless it is skipped."""
        for _, state in self.stages:
            if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
                state.count.add_(1 if found_inf is None else found_inf != 1)


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """The kernel for these rules, if there is one."""
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as adam, Scale()] | [Adam() as adam, Decay(), Scale()]:
            return _adam(fused_adamw, stages, adam, states[0], decoupled=True)
        case [Decay(), Adam() as adam, Scale()]:
            return _adam(fused_adam, stages, adam, states[1], decoupled=False)
        case [Momentum() as rule, Scale()] | [Decay(), Momentum() as rule, Scale()] if rule.decay > 0:
            return _sgd(stages, (states[-2].trace,), rule.decay, rule.nesterov)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(stages, (), 0.0, False)
    return None


def _adam(
    kernel: Callable[..., None], stages: Sequence[Stage], rule: Adam, state: ScaleByAdamState, *, decoupled: bool
) -> Fusion:
    betas = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps}

    def begin() -> tuple[Callable[..., None], Callable[..., None] | None]:
        count = state.count + 1
        step = count.float()

        def launch(params: Leaves, grads: Leaves, mu: Leaves, nu: Leaves, **scalars: Any) -> None:
            kernel(params, grads, mu, nu, [], [step] * len(params), amsgrad=False, **betas, **scalars)

        fused_copying = copying_kernel(step.device)
        if fused_copying is None:
            return launch, None
        corrected = corrections(rule, count)

        def copying(*columns: Leaves, lr: Any, weight_decay: float, grad_scale: Any, found_inf: Any) -> None:
            given = (lr, 1.0 if grad_scale is None else grad_scale, 0.0 if found_inf is None else found_inf)
            # `full_like`: to copy a number from the host could make it wait
            known = [x if isinstance(x, Tensor) else torch.full_like(step, x) for x in given]
            scalars = torch.stack([*known, *corrected])
            for row in zip(*columns, strict=True):
                fused_copying(*row, scalars, weight_decay=weight_decay, decoupled=decoupled, **betas)

        return launch, copying

    return Fusion(stages, (state.mu, state.nu), begin)


def corrections(rule: Adam, count: Tensor) -> tuple[Tensor, Tensor]:
    """`1 - b1^count` and `sqrt(1 - b2^count)`, 0-dim, float32, rounded once. The host does not wait for `count`.

    They are the sums of the weights of gradients in the moments. A kernel makes those weights of betas in float32, and
    so are the betas here: with 0.999 as it is written, the second correction of the first step is 1.3e-5 of itself off.
    Powers are taken in float64: from powers in float32, as torch's kernel on CUDA takes them, it is 7e-6 off at the
    second.
    """
    b1, b2 = (ctypes.c_float(beta).value for beta in (rule.b1, rule.b2))
    t = count.double()
    return (1 - torch.pow(b1, t)).float(), (1 - torch.pow(b2, t)).sqrt().float()


def copying_kernel(device: torch.device) -> Callable[..., None] | None:
    """A kernel that takes a step and writes the copies in one pass, where there is one."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from yafsdp_fn.optim.step import kernels  # triton takes a second to import

    return kernels.adam_copying


def _sgd(stages: Sequence[Stage], moments: tuple[Tree, ...], momentum: float, nesterov: bool) -> Fusion:
    def launch(params: Leaves, grads: Leaves, trace: Leaves | None = None, **scalars: Any) -> None:
        rule: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "is_first_step": False}
        fused_sgd(params, grads, trace or [], **rule, **scalars)

    # in torch 2.13 it leaves all but the last few elements as they are (pytorch issue 191763)
    return Fusion(stages, moments, lambda: (launch, None), lossy=True)


def _fp32(value: Any, device: torch.device) -> Any:
    """The CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32) if isinstance(value, Tensor) else value
