"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalised by Newton-Schulz iterations.

    momentum = beta * momentum + (1 - beta) * g;   m = beta * momentum + (1 - beta) * g    (nesterov)
    param -= learning_rate * (shape_factor * orthogonalised(m) + weight_decay * param)

Momentum is kept in flat shards; each matrix is orthogonalised once, by the rank that owns it (util/owners.py).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import EmptyState, GradientTransformation, State, as_transformation, chain, new_count
from yafsdp_fn.optim.leafwise import Blocks, Leafwise, assume_leafwise, leafwise
from yafsdp_fn.optim.partition import add_decayed_weights, partition
from yafsdp_fn.optim.rules import adamw
from yafsdp_fn.optim.scaling import Rate, scale_by_learning_rate
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.tree import LayerParam, Param, Tree

Coefficients = tuple[float, float, float]
NS_COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
"""Jordan's, for the quintic `a x + b x^3 + c x^5`: five steps bring singular values to about 0.7 to 1.2."""

Adjust = Literal["original", "match_rms_adamw", "none"]


def newton_schulz(x: Tensor, steps: int = 5, coefficients: Coefficients = NS_COEFFICIENTS, eps: float = 1e-7) -> Tensor:
    """Approximates `U V^T` of `x = U S V^T` [..., m, n], in the dtype of `x`, in `steps` iterations.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
    >>> singular = torch.linalg.svdvals(ya.optim.newton_schulz(x))
    >>> singular.min() > 0.6, singular.max() < 1.3
    (tensor(True), tensor(True))
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)  # its singular values are at most 1
    batch = x.shape[:-2]
    x = x.flatten(0, -3) if batch else x
    add = torch.baddbmm if batch else torch.addmm  # in fewer roundings than a product and a sum
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(*batch, *x.shape[-2:])
    return x.mT if tall else x


def in_bf16(device: torch.device) -> torch.dtype | None:
    """Returns bfloat16 on a GPU, None on CPUs, where products of bfloat16 may take a hundred times as long."""
    return torch.bfloat16 if device.type == "cuda" else None


class MeanMomentumState(NamedTuple):
    """The state of `mean_momentum`. count: int32 [], completed steps; mu: decaying mean of updates, a tree like the
    parameters"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tree


def mean_momentum(beta: float, nesterov: bool = True) -> GradientTransformation:
    """Replaces updates by their decaying mean, `mu = beta * mu + (1 - beta) * g`, rounded as torch.optim.Muon rounds
    it.

    >>> update(ya.optim.mean_momentum(0.9, nesterov=False))
    tensor([ 0.3000, -0.4000])
    """

    def init(params: Tree) -> State:
        return MeanMomentumState(new_count(params), optree.tree_map(torch.zeros_like, params))

    def update(updates: Tree, state: MeanMomentumState, params: Tree | None = None) -> tuple[Tree, State]:
        new = optree.tree_map(lambda g, mu: mu.lerp(g, 1 - beta), updates, state.mu)
        out = optree.tree_map(lambda g, mu: g.lerp(mu, beta), updates, new) if nesterov else new
        return out, MeanMomentumState(state.count + 1, new)

    return GradientTransformation(init, update, elementwise=True)


def orthogonalize(
    ns_steps: int = 5,
    ns_coeffs: Coefficients = NS_COEFFICIENTS,
    eps: float = 1e-7,
    adjust: Adjust = "original",
    dtype: Any = in_bf16,
    blocks: Blocks | None = None,
) -> GradientTransformation:
    """Replaces updates of matrices, [m, n] or [..., m, n], by their orthogonalised ones, times a factor of the
    shape, `sqrt(max(1, m / n))` (original), or `0.2 sqrt(max(m, n))`, which gives updates the size of AdamW's
    (match_rms_adamw; Liu et al., 2025).

    dtype: of the iterations, and of messages, or a function from the device to it; None: the updates' own
    blocks: a rule `(path, per-layer Param) -> (dim, count)`: each of `count` equal blocks along `dim` of a leaf, such
        as the heads of a projection, is a matrix of its own, with the factor of its shape; None: the leaf is one

    >>> tx = ya.optim.orthogonalize(ns_steps=10, dtype=None)
    >>> x = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
    >>> torch.linalg.svdvals(tx.update(x, tx.init(x), x)[0]).min() > 0.6
    tensor(True)
    """
    factors: dict[str, Callable[[int, int], float]] = {
        "original": lambda m, n: math.sqrt(max(1, m / n)),
        "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        "none": lambda m, n: 1.0,
    }
    if adjust not in factors:
        raise ValueError(f"orthogonalize: adjust={adjust!r}; expected one of {', '.join(factors)}")

    def init(leaf: Tensor) -> State:
        if leaf.ndim < 2:
            raise ValueError(
                f"orthogonalize: a leaf of shape {tuple(leaf.shape)} is no matrix; leave it to `others` of `muon`, "
                "with where=ya.optim.layer_matrices, or to another label of `partition`"
            )
        return EmptyState()

    def update(updates: Tensor, state: State, params: Tensor | None = None) -> tuple[Tensor, State]:
        return newton_schulz(updates, ns_steps, ns_coeffs, eps), state

    tx = assume_leafwise(GradientTransformation(init, update), dtype)
    assert isinstance(tx.rule, Leafwise)
    cut = tx.rule.blocks if blocks is None else blocks
    return leafwise(dataclasses.replace(tx.rule, scale=lambda shape: factors[adjust](*shape[-2:]), blocks=cut))


def layer_matrices(path: str, param: Param) -> bool:
    """Chooses matrices of stacks: a rule.

    >>> tx = ya.optim.muon(0.02, where=lambda path, p: ya.optim.layer_matrices(path, p) and not path.endswith("down"))
    >>> ya.optim.parts_of(tx, state.params)
    {2: 3, 3: 3, 4: 3, 5: 3}
    """
    return isinstance(param, LayerParam) and len(param.shape) > 1


def muon(
    learning_rate: float | Rate,
    ns_coeffs: Coefficients = NS_COEFFICIENTS,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-7,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    adjust: Adjust = "original",
    dtype: Any = in_bf16,
    where: LeafRule = layer_matrices,
    others: Any = None,
    blocks: Blocks | None = None,
) -> GradientTransformation:
    """Muon for the leaves that `where` chooses, by default matrices of stacks; `others` for the rest: embeddings, head
    and gains. With `dtype=torch.bfloat16` it is torch.optim.Muon's update.

    others: default `adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay)`. One learning rate suits both
        with `adjust="match_rms_adamw"`, else give `others` one of its own
    blocks: as for `orthogonalize`; of 8 heads, `lambda path, p: (-2, 8) if path.endswith("wq") else None`

    Memory: one moment for its leaves, and that of `others` for the rest. If both kinds share a unit, such as the
    matrices and the norm gains of a layer, the moments of both span it: `ya.Pinned` gains are in a unit of their own.

    Bytes: the parts of a unit's matrices that their owners lack travel there and back, in `dtype` (util/owners.py).

    >>> tx = ya.optim.muon(0.02, adjust="match_rms_adamw", others=ya.optim.adamw(3e-4))
    >>> state, metrics = ya.train_step(loss_fn, tx)(ya.init(params, tx, mesh=mesh), batch)
    >>> state.step
    1
    """
    matrices = chain(
        mean_momentum(beta, nesterov),
        orthogonalize(ns_steps, ns_coeffs, eps, adjust, dtype, blocks),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    rest = adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay) if others is None else others
    parts = {"muon": matrices, "others": as_transformation(rest)}
    return partition(parts, lambda path, param: "muon" if where(path, param) else "others")
