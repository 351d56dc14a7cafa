"""A Triton kernel: AdamW (or Adam with decay in the gradient) that also writes the parameters' working copy.

    p, m, v, copy  <-  step(p, g / grad_scale, m, v), and nothing where found_inf is 1

The arithmetic is that of torch's fused kernels on CUDA (2.11 to 2.13), operation by operation, all in float32, with the
same fused multiply-adds and correctly rounded divisions and roots. Only the corrections differ: the caller computes
them (fused.py), while torch's kernels use powers in float32. It is one pass over 30 bytes an element (float32,
bfloat16 copy) instead of two over 38: a separate copy reads the parameters again, and torch's kernel writes the divided
gradients back.
"""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK = 1024
"""Elements of one program."""


# triton evaluates annotations, and refuses names that are not its own
def _adam(
    params: tl.tensor,
    grads: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    copies: tl.tensor,
    scalars: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    size: tl.tensor,
    decoupled: tl.constexpr,
    decays: tl.constexpr,
    block: tl.constexpr,
) -> None:
    rate, scale, found_inf = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    correction1, root_correction2 = tl.load(scalars + 3), tl.load(scalars + 4)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < tl.where(found_inf == 1.0, 0, size)  # `&` of this condition is more than the interpreter of 3.7 can
    p, g = tl.load(params + at, mask=inside, other=0.0), tl.load(grads + at, mask=inside, other=0.0)
    m, v = tl.load(first + at, mask=inside, other=0.0), tl.load(second + at, mask=inside, other=0.0)
    g = tl.div_rn(g, scale)
    if decays:
        if decoupled:
            p = tl.fma(-(rate * weight_decay), p, p)
        else:
            g = tl.fma(p, weight_decay, g)
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    v = tl.fma(beta2, v, tl.fma(-beta2, g * g, g * g))
    p = p - tl.div_rn(tl.div_rn(rate, correction1) * m, tl.div_rn(tl.sqrt_rn(v), root_correction2) + eps)
    tl.store(params + at, p, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(copies + at, p.to(copies.dtype.element_ty), mask=inside)


ADAM = triton.jit(_adam)


def adam_copying(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    copy: Tensor,
    scalars: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Takes one step of contiguous float32 tensors of one size; copy: the same in another dtype.

    scalars: float32 [5]: learning rate, grad_scale, found_inf, 1 - beta1^t, sqrt(1 - beta2^t)
    """
    grid = (triton.cdiv(param.numel(), BLOCK),)
    numbers = (beta1, beta2, eps, weight_decay, param.numel())
    ADAM[grid](param, grad, mu, nu, copy, scalars, *numbers, decoupled=decoupled, decays=weight_decay != 0, block=BLOCK)
