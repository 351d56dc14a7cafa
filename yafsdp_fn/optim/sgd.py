"""Stochastic gradient descent, with momentum as in Optax: `trace = g + momentum * trace`."""

import dataclasses
from typing import NamedTuple

import optree
import torch

from yafsdp_fn.optim.base import GradientTransformation, State, chain, identity
from yafsdp_fn.optim.rates import Rate
from yafsdp_fn.optim.scaling import scale_by_learning_rate
from yafsdp_fn.params.tree import Tree


class TraceState(NamedTuple):
    """trace: decaying sum of gradients, a tree like the parameters."""

    trace: Tree


@dataclasses.dataclass(frozen=True)
class Momentum:
    """Rule: replace updates by their decaying sum."""

    decay: float
    nesterov: bool


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Decaying sum of updates (not a mean: nothing is multiplied by `1 - decay`)."""

    def init(params: Tree) -> State:
        return TraceState(optree.tree_map(torch.zeros_like, params))

    def update(updates: Tree, state: TraceState, params: Tree | None = None) -> tuple[Tree, State]:
        new = optree.tree_map(lambda g, t: g + decay * t, updates, state.trace)
        out = optree.tree_map(lambda g, t: g + decay * t, updates, new) if nesterov else new
        return out, TraceState(new)

    return GradientTransformation(init, update, elementwise=True, rule=Momentum(decay, nesterov))


def sgd(learning_rate: float | Rate, momentum: float | None = None, nesterov: bool = False) -> GradientTransformation:
    """SGD, with `trace(momentum, nesterov)` if a momentum is given."""
    if nesterov and momentum is None:
        raise ValueError("sgd: nesterov=True needs a momentum")
    return chain(identity() if momentum is None else trace(momentum, nesterov), scale_by_learning_rate(learning_rate))
