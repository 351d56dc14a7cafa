"""Finds the largest eigenvalues of a symmetric product, by the Lanczos method with thick restarts (Wu and Simon 2000).

    basis q[0], q[1], ... orthonormal;   A q[k-1] = sum T[i, k-1] q[i] + rest q[k]
    eigenpairs (t, s) of T [k, k]  ->  A (Q s) = t (Q s) + rest s[k-1] q[k]:   the last term is the error
    a full basis:  keep the best Q s and q[k], which form an equally good basis, and go on

Vectors are sharded trees, T is on the host, the same on every rank. A product has parts along the last two vectors, the
first one after a restart along all of them; then it is made orthogonal to all once more. Otherwise rounding brings
converged eigenvectors back as copies.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.lab.curvature.trees import add_, combination, directions
from yafsdp_fn.params.algebra import global_norm, vdot
from yafsdp_fn.params.tree import Tree


class Eigenpairs(NamedTuple):
    """The eigenpairs found.

    values: [count] float64 on the CPU, the largest first; vectors: trees of norm 1; residuals: [count], the norms of `A
    x - value x`, which bound how far each value is from an eigenvalue; products: the number used
    """

    values: Tensor
    vectors: list[Tree]
    residuals: Tensor
    products: int


def top_eigenpairs(
    product: Callable[[Tree], Tree],
    params: Tree,
    count: int = 1,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
    products: int = 300,
    width: int = 20,
) -> Eigenpairs:
    """Finds the `count` largest eigenvalues (not magnitudes) of a symmetric `product(v) -> A v`; negate it for the
    smallest.

    params: the vectors' structure; frozen leaves stay zero. seed: of the start, the same at every number of ranks
    tolerance: of each residual, relative to its |eigenvalue|; an isolated eigenvalue is then right to tolerance squared
    width: vectors held at once, besides a few; more of them take fewer products

    One vector of each eigenspace is found. Raises RuntimeError if `products` do not suffice, and ValueError if there
    are fewer than `count` different eigenvalues. "Thick-Restart Lanczos Method for Large Symmetric Eigenvalue
    Problems", SIAM J. Matrix Anal. Appl. 22.
    """
    if not 1 <= count <= width - 2:
        raise ValueError(f"top_eigenpairs(count={count}, width={width}): expected 1 <= count <= width - 2")
    start, T = directions(seed, params), torch.zeros(width, width, dtype=torch.float64)
    if not (length := float(global_norm(start))):
        raise ValueError("top_eigenpairs: no direction to look along: params have nothing that is trained")
    basis = [combination([1 / length], [start])]
    kept, eps = 0, torch.finfo(global_norm(start).dtype).eps
    for used in range(1, products + 1):
        k, w = len(basis), combination([1.0], [product(basis[-1])])
        for i in [*range(0 if k == kept + 1 else k - 2, k), *range(k)]:
            along = float(vdot(basis[i], w))
            T[i, k - 1] += along
            add_(w, -along, basis[i])
        rest, (values, S) = float(global_norm(w)), (x.flip(-1) for x in torch.linalg.eigh(T[:k, :k], UPLO="U"))
        residuals, rounding = rest * S[-1].abs(), 10 * eps * float(values.abs().max())
        if rest <= rounding and k < count:  # nothing is left of the start's space
            raise ValueError(f"top_eigenpairs: {k} different eigenvalues can be seen, asked for {count}")
        # against each value itself: the start is an eigenvector of 0, or so it looks beside the largest eigenvalue
        if k >= count and bool((residuals <= tolerance * values.abs() + rounding)[:count].all()):
            best = [combination(s.tolist(), basis) for s in S.T[:count]]
            return Eigenpairs(values[:count], best, residuals[:count], used)
        if k == width:
            kept = (count + width) // 2
            basis = [combination(s.tolist(), basis) for s in S.T[:kept]]
            T.zero_().diagonal()[:kept] = values[:kept]
        basis.append(combination([1 / rest], [w]))
    raise RuntimeError(
        f"top_eigenpairs: after {products} products the eigenvalues are {values[:count].tolist()}, with residuals "
        f"{residuals[:count].tolist()}; expected {tolerance:g} of each. Raise products, width or tolerance"
    )
