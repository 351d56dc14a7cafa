"""Adam's step of large units on CUDA, which writes the parameters' working copies in the same pass (kernels.py).

It is a launch for every piece. A unit goes one way or the other by its own size, so bits do not depend on how units are
grouped, cut or dealt to ranks, and the launches of a model of small units stay as few as they are.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.optim.adamw import Adam

Leaves = list[Tensor]


def of(rule: Adam, device: torch.device, *, decoupled: bool) -> Callable[[Tensor], Callable[..., None]] | None:
    """From the count of a step its kernel, `(params, grads, mu, nu, copies, lr=, weight_decay=, grad_scale=,
    found_inf=)`, where there is one."""
    kernel = copying_kernel(device)
    if kernel is None:
        return None
    launch, betas = kernel, {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps}

    def begin(count: Tensor) -> Callable[..., None]:
        step, corrected = count.float(), corrections(rule, count)

        def copying(*columns: Leaves, lr: Any, weight_decay: float, grad_scale: Any, found_inf: Any) -> None:
            given = (lr, 1.0 if grad_scale is None else grad_scale, 0.0 if found_inf is None else found_inf)
            # `full_like`: to copy a number from the host could make it wait
            known = [x if isinstance(x, Tensor) else torch.full_like(step, x) for x in given]
            scalars = torch.stack([*known, *corrected])
            for row in zip(*columns, strict=True):
                launch(*row, scalars, weight_decay=weight_decay, decoupled=decoupled, **betas)

        return copying

    return begin


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
