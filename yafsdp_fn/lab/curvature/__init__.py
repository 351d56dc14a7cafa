"""Curvature of a loss at its parameters, with vectors that are sharded as the parameters are.

    product = partial(hessian_product(loss), params, batch)            # v -> H v
    top = top_eigenpairs(product, params, 3)                           # .values, .vectors, .residuals
    noise = gradient_noise_scale(loss, params, batch)                  # .scale, in examples
    tested = influence(loss, params, train, test, gauss_newton, damping=0.1)

A loss is as for `ya.train_step`: `loss(params, batch)` -> a scalar or `ya.Mean`, where `batch` is this rank's part, so
that everything here is of the objective that a step descends, and the same at every number of ranks. It must not draw
random numbers. Vectors are trees like `params`, of floating-point leaves, zero where these are frozen; plain trees work
too. Every rank makes all calls.

Under these derivatives visits take the pure path (docs/transforms.md). torch's fused attention has no derivative of a
derivative: put `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around it.
"""

from yafsdp_fn.lab.curvature.examples import example_gradient_norms
from yafsdp_fn.lab.curvature.forward import forward_gradient
from yafsdp_fn.lab.curvature.gauss_newton import gauss_newton_product
from yafsdp_fn.lab.curvature.hessian import hessian_product
from yafsdp_fn.lab.curvature.influence import influence
from yafsdp_fn.lab.curvature.lanczos import Eigenpairs, top_eigenpairs
from yafsdp_fn.lab.curvature.noise import NoiseScale, gradient_noise_scale
from yafsdp_fn.lab.curvature.solve import Solution, conjugate_gradients

__all__ = [
    "Eigenpairs",
    "NoiseScale",
    "Solution",
    "conjugate_gradients",
    "example_gradient_norms",
    "forward_gradient",
    "gauss_newton_product",
    "gradient_noise_scale",
    "hessian_product",
    "influence",
    "top_eigenpairs",
]
