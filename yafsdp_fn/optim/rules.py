"""The rules of Adam, AdamW, SGD, RMSProp and Lion, as in Optax. Adam's:

mu = b1 * mu + (1 - b1) * g;  nu = b2 * nu + (1 - b2) * g ** 2;  count += 1
update = (mu / (1 - b1 ** count)) / (sqrt(nu / (1 - b2 ** count)) + eps)
AdamW: param -= learning_rate * (update + weight_decay * param)
"""

import dataclasses
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, chain, identity, must_not_be_negative, new_count
from yafsdp_fn.optim.partition import add_decayed_weights
from yafsdp_fn.optim.scaling import Rate, scale_by_learning_rate
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.util.foreign_names import with_hints


class ScaleByAdamState(NamedTuple):
    """The state of Adam. count: int32 [], completed steps; mu, nu: first and second moments, trees like the
    parameters"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tree
    nu: Tree


@dataclasses.dataclass(frozen=True)
class Adam:
    """Rule: divide the mean gradient by its root mean square."""

    b1: float
    b2: float
    eps: float

    def __post_init__(self) -> None:
        several = isinstance(self.b1, tuple | list)  # torch's betas
        if several or not (0 <= self.b1 < 1 and 0 <= self.b2 < 1 and self.eps >= 0):
            raise ValueError(f"adam: expected b1 and b2 in [0, 1) and eps >= 0, got {self}")


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Scales by Adam without the learning rate: bias-corrected first moment over the root of the second.

    >>> update(ya.optim.scale_by_adam())
    tensor([ 1.0000, -1.0000])
    """

    def init(params: Tree) -> State:
        mu, nu = (optree.tree_map(torch.zeros_like, params) for _ in range(2))
        return ScaleByAdamState(new_count(params), mu, nu)

    def update(updates: Tree, state: ScaleByAdamState, params: Tree | None = None) -> tuple[Tree, State]:
        count = state.count + 1
        mu = optree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = optree.tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        # in fp64: 1 - 0.999 ** 1 has four wrong digits in fp32
        correct1, correct2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()
        out = optree.tree_map(lambda m, v: ((m / correct1) / ((v / correct2).sqrt() + eps)).to(m.dtype), mu, nu)
        return out, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update, elementwise=True, rule=Adam(b1, b2, eps))


@with_hints
def adam(learning_rate: float | Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam (Kingma and Ba, 2014).

    learning_rate: a number, or a rate by the count
    b1, b2: decays of the first and the second moment, in [0, 1); eps: added to the root of the second

    Raises ValueError for b1 or b2 outside [0, 1), and for a negative eps.

    >>> update(ya.optim.adam(0.1))
    tensor([-0.1000,  0.1000])
    """
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


@with_hints
def adamw(
    learning_rate: float | Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: LeafRule | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    mask: `(path, per-layer Param) -> bool`: the leaves that decay; default all. Usual:
        `lambda path, p: len(p.shape) > 1`
    learning_rate, b1, b2, eps: as for `adam`; weight_decay: part of a parameter, times the learning rate

    >>> update(ya.optim.adamw(0.1, weight_decay=0.5))          # -0.1 of the sign, -0.05 of the weight
    tensor([-0.1500,  0.2000])
    >>> matrices = ya.optim.adamw(3e-4, mask=lambda path, p: len(p.shape) > 1)
    """
    return chain(
        scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


# ---- Stochastic gradient descent, with momentum as in Optax: `trace = g + momentum * trace`.


class TraceState(NamedTuple):
    """The state of `trace`. trace: decaying sum of gradients, a tree like the parameters"""

    trace: Tree


@dataclasses.dataclass(frozen=True)
class Momentum:
    """Rule: replace updates by their decaying sum."""

    decay: float
    nesterov: bool


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Replaces updates by their decaying sum (not a mean: nothing is multiplied by `1 - decay`).

    >>> update(ya.optim.trace(0.9, nesterov=True))
    tensor([ 5.7000, -7.6000])
    """
    must_not_be_negative("momentum", decay)

    def init(params: Tree) -> State:
        return TraceState(optree.tree_map(torch.zeros_like, params))

    def update(updates: Tree, state: TraceState, params: Tree | None = None) -> tuple[Tree, State]:
        new = optree.tree_map(lambda g, t: g + decay * t, updates, state.trace)
        out = optree.tree_map(lambda g, t: g + decay * t, updates, new) if nesterov else new
        return out, TraceState(new)

    return GradientTransformation(init, update, elementwise=True, rule=Momentum(decay, nesterov))


@with_hints
def sgd(learning_rate: float | Rate, momentum: float | None = None, nesterov: bool = False) -> GradientTransformation:
    """SGD, with `trace(momentum, nesterov)` if a momentum is given.

    learning_rate: a number, or a rate by the count

    Raises ValueError for `nesterov` without a momentum.

    >>> update(ya.optim.sgd(0.1))
    tensor([-0.3000,  0.4000])
    """
    if nesterov and momentum is None:
        raise ValueError("sgd: nesterov=True needs a momentum")
    return chain(identity() if momentum is None else trace(momentum, nesterov), scale_by_learning_rate(learning_rate))


# ---- RMSProp, as in Optax: updates over the root of their mean square.


class ScaleByRmsState(NamedTuple):
    """The state of `scale_by_rms`. nu: mean square of updates, a tree like the parameters; count: int32 [], completed
    steps, with bias correction"""

    nu: Tree
    count: Tensor | None = None  # type: ignore[assignment]  # Optax's name; it hides tuple.count


def scale_by_rms(
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Divides updates by the root of their mean square.

    eps_in_sqrt: `u / sqrt(nu + eps)`, else `u / (sqrt(nu) + eps)`; initial_scale: the first mean square
    bias_correction: of the mean square. With it, and eps outside the root, it is `scale_by_adam(b1=0)` without the
        memory of a first moment

    >>> update(ya.optim.scale_by_rms(decay=0.75))
    tensor([ 2., -2.])
    """
    must_not_be_negative("eps", eps)

    def init(params: Tree) -> State:
        nu = optree.tree_map(lambda p: torch.full_like(p, initial_scale), params)
        return ScaleByRmsState(nu, new_count(params) if bias_correction else None)

    def update(updates: Tree, state: ScaleByRmsState, params: Tree | None = None) -> tuple[Tree, State]:
        nu = optree.tree_map(lambda v, g: decay * v + (1 - decay) * g * g, state.nu, updates)
        count = state.count
        correct: Any = 1.0
        if count is not None:
            count = count + 1
            correct = 1 - decay ** count.double()  # in fp64, as for Adam

        def scaled(u: Tensor, v: Tensor) -> Tensor:
            square: Tensor = v / correct
            root = (square + eps).sqrt() if eps_in_sqrt else square.sqrt() + eps
            return (u / root).to(v.dtype)

        return optree.tree_map(scaled, updates, nu), ScaleByRmsState(nu, count)

    return GradientTransformation(init, update, elementwise=True)


@with_hints
def rmsprop(
    learning_rate: float | Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSProp (Hinton, 2012): `scale_by_rms`, then the learning rate; then `trace(momentum, nesterov)` if a momentum is
    given. torch.optim.RMSprop has `eps_in_sqrt=False`.

    >>> update(ya.optim.rmsprop(0.1, decay=0.75))
    tensor([-0.2000,  0.2000])
    """
    return chain(
        scale_by_rms(decay, eps, initial_scale, eps_in_sqrt, bias_correction),
        scale_by_learning_rate(learning_rate),
        identity() if momentum is None else trace(momentum, nesterov),
    )


# ---- Lion, as in Optax: steps of one size along the sign of a mean gradient (Chen et al., 2023, arXiv 2302.06675).
#
# update = sign(b1 * mu + (1 - b1) * g);  mu = b2 * mu + (1 - b2) * g
# lion: param -= learning_rate * (update + weight_decay * param)


class ScaleByLionState(NamedTuple):
    """The state of Lion. count: int32 [], completed steps; mu: mean gradient, a tree like the parameters"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    mu: Tree


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, mu_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Scales by Lion without the learning rate: every element of an update is -1, 0 or 1.

    b1: share of the mean in the update; b2: decay of the mean; mu_dtype: of the mean, default the parameters'

    >>> update(ya.optim.scale_by_lion())
    tensor([ 1., -1.])
    """

    def init(params: Tree) -> State:
        mu = optree.tree_map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByLionState(new_count(params), mu)

    def update(updates: Tree, state: ScaleByLionState, params: Tree | None = None) -> tuple[Tree, State]:
        signs = optree.tree_map(lambda g, m: torch.sign((1 - b1) * g + b1 * m), updates, state.mu)
        mu = optree.tree_map(lambda m, g: (b2 * m + (1 - b2) * g).to(m.dtype), state.mu, updates)
        return signs, ScaleByLionState(state.count + 1, mu)

    return GradientTransformation(init, update, elementwise=True)


@with_hints
def lion(
    learning_rate: float | Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float = 1e-3,
    mask: LeafRule | None = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay. Beside AdamW it usually takes a learning rate 3 to 10 times smaller, and a
    decay as much larger. It keeps one moment; Adam keeps two.

    mask: the leaves that decay, as for `adamw`; default all

    >>> update(ya.optim.lion(0.1, weight_decay=0.0))
    tensor([-0.1000,  0.1000])
    """
    return chain(
        scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
