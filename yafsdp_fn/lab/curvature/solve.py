"""Solves `(A + damping) x = b` by conjugate gradients (Hestenes and Stiefel 1952), using only products with A."""

from collections.abc import Callable
from typing import NamedTuple

from yafsdp_fn.lab.curvature.trees import add_, combination
from yafsdp_fn.params.algebra import vdot
from yafsdp_fn.params.tree import Tree


class Solution(NamedTuple):
    """The solution of a linear system. x: a tree like b; residual: `|b - (A + damping) x| / |b|`, as the iteration has
    it; products: the number used"""

    x: Tree
    residual: float
    products: int


def conjugate_gradients(
    product: Callable[[Tree], Tree], b: Tree, *, damping: float = 0.0, tolerance: float = 1e-5, products: int = 300
) -> Solution:
    """Solves `product(x) + damping x = b`, for a symmetric product that with its damping is positive definite.

    b: a sharded or plain tree, such as a gradient; tolerance: of the residual

    Raises ValueError at a direction in which the matrix is not positive, as for a Hessian that is not convex there; and
    RuntimeError if `products` do not suffice.
    """
    x, rest, p = combination([0.0], [b]), combination([1.0], [b]), b
    size = left = float(vdot(b, b))
    for used in range(products + 1):
        if left <= tolerance**2 * size:
            return Solution(x, (left / size) ** 0.5 if size else 0.0, used)
        image = combination([1.0, damping], [product(p), p])
        curvature = float(vdot(p, image))
        if not curvature > 0.0:
            raise ValueError(
                f"conjugate_gradients: after {used} products the curvature {curvature / float(vdot(p, p)):g} along a "
                f"direction, damping {damping:g} included, is not positive. Raise damping, or use gauss_newton_product"
            )
        step = left / curvature
        x, rest = add_(x, step, p), add_(rest, -step, image)
        before, left = left, float(vdot(rest, rest))
        p = combination([1.0, left / before], [rest, p])
    raise RuntimeError(
        f"conjugate_gradients: after {products} products the residual is {(left / size) ** 0.5:g}, expected "
        f"{tolerance:g} at most. Raise damping, products or tolerance"
    )
