"""SOAP (Vyas et al., 2024): Adam in the eigenbasis of Shampoo's preconditioners.

    L = b3 * L + (1 - b3) * g g^T;   R = b3 * R + (1 - b3) * g^T g;   Q_L, Q_R: bases in which they are about diagonal
    update = Q_L adam(Q_L^T g Q_R) Q_R^T

The bases begin as the identity, so that the first step is Adam's, and take one step of orthogonal iteration in every
update, `Q = qr((L + shift) Q)`. Without a shift, rounding would decide the directions that have had no gradient yet.
Each matrix is updated whole, by the rank that owns it; its state is in flat shards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn import Param
from yafsdp_fn.optim import (
    GradientTransformation,
    Rate,
    adamw,
    add_decayed_weights,
    as_transformation,
    assume_leafwise,
    chain,
    layer_matrices,
    partition,
    scale_by_learning_rate,
)


class SoapState(NamedTuple):
    """The state of a matrix [m, n].

    count: float []; mu [m, n], and nu [m, n] in the bases; left [m, m], right [n, n]; their bases
    """

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tensor
    nu: Tensor
    left: Tensor
    right: Tensor
    left_basis: Tensor
    right_basis: Tensor


SHIFT = 1e-3
"""The shift, as a part of a preconditioner's mean eigenvalue."""


def scale_by_soap(b1: float = 0.95, b2: float = 0.95, b3: float = 0.95, eps: float = 1e-8) -> GradientTransformation:
    """Scales matrices by SOAP without the learning rate. b1, b2: of Adam's moments; b3: of the preconditioners

    >>> tx = ya.optim.contrib.scale_by_soap()
    >>> x = torch.tensor([[3.0, 1.0], [0.0, 0.5]])
    >>> tx.update(x, tx.init(x), x)[0].shape
    torch.Size([2, 2])
    """

    def init(leaf: Tensor) -> Any:
        if leaf.ndim != 2:
            raise ValueError(
                f"scale_by_soap: a leaf of shape {tuple(leaf.shape)} is no matrix [m, n]; leave it to `others` of "
                "`soap`, with where=lambda path, p: ya.optim.layer_matrices(path, p) and p.ndim == 2, or to another "
                "label of `partition`"
            )
        squares = [leaf.new_zeros(n, n) for n in leaf.shape]
        bases = [torch.eye(n, dtype=leaf.dtype, device=leaf.device) for n in leaf.shape]
        return SoapState(leaf.new_zeros(()), torch.zeros_like(leaf), torch.zeros_like(leaf), *squares, *bases)

    def update(updates: Tensor, state: SoapState, params: Tensor | None = None) -> tuple[Tensor, Any]:
        left_basis = state.left_basis
        right_basis = state.right_basis
        count = state.count + 1
        mu = state.mu.lerp(updates, 1 - b1)
        nu = state.nu.lerp((left_basis.mT @ updates @ right_basis).square(), 1 - b2)
        correct1, correct2 = (1 - b ** count.double() for b in (b1, b2))
        inside = (left_basis.mT @ mu @ right_basis) / correct1 / ((nu / correct2).sqrt() + eps)
        new = left_basis @ inside.to(updates.dtype) @ right_basis.mT
        left = state.left.lerp(updates @ updates.mT, 1 - b3)
        right = state.right.lerp(updates.mT @ updates, 1 - b3)
        return new, SoapState(count, mu, nu, left, right, _next(left, left_basis), _next(right, right_basis))

    return assume_leafwise(GradientTransformation(init, update))


def _next(side: Tensor, basis: Tensor) -> Tensor:
    """Takes one step of orthogonal iteration. Column signs are those of a QR with a positive diagonal."""
    q, r = torch.linalg.qr(side @ basis + SHIFT * side.diagonal().mean() * basis)
    new: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return new


def soap(
    learning_rate: float | Rate,
    b1: float = 0.95,
    b2: float = 0.95,
    b3: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    where: Callable[[str, Param], bool] = layer_matrices,
    others: Any = None,
) -> GradientTransformation:
    """SOAP for the matrices that `where` chooses, by default those of stacks; `others` for the rest, by default
    `adamw(learning_rate, b1, b2, eps, weight_decay)`. Raises ValueError if a chosen leaf is not a matrix, such as the
    experts [E, m, n] of a layer.

    Memory: for a matrix [m, n], 2 m n + 2 m^2 + 2 n^2 numbers; all of them travel, as far as its owner lacks them.

    >>> tx = ya.optim.contrib.soap(3e-3)
    >>> state, metrics = ya.train_step(loss_fn, tx)(ya.init(params, tx, mesh=mesh), batch)
    >>> state.step
    1
    """
    matrices = chain(
        scale_by_soap(b1, b2, b3, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate)
    )
    rest = adamw(learning_rate, b1, b2, eps, weight_decay) if others is None else as_transformation(others)
    return partition({"soap": matrices, "others": rest}, lambda path, p: "soap" if where(path, p) else "others")
