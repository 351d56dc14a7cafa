"""What a loss returns: values that know how to be combined over microbatches and ranks.

    Mean(total, weight)   sum of totals / sum of weights: masked and uneven batches come out right
    Sum(value), Max(value)

A bare scalar loss is `Mean(value, 1)`: parts count equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.tree import Tree


class Mean(NamedTuple):
    """total: scalar tensor; weight: scalar tensor or number that does not depend on parameters."""

    total: Tensor
    weight: Tensor | float


class Sum(NamedTuple):
    """A tensor to be added up over microbatches and ranks; integers and booleans come back as int64."""

    value: Tensor


class Max(NamedTuple):
    """A tensor whose elementwise maximum over microbatches and ranks is wanted."""

    value: Tensor


def as_mean(loss: Any, what: str = "the loss") -> Mean:
    """Checks what a loss function returned. `weight` comes back as a detached tensor on the total's device."""
    mean = loss if isinstance(loss, Mean) else Mean(loss, 1.0)
    total, weight = mean
    if not isinstance(total, Tensor) or total.ndim:
        got = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(f"{what}: expected a scalar tensor or ya.Mean of one, got {got}; with aux, pass has_aux=True")
    if not total.is_floating_point():
        raise TypeError(f"{what}: expected a floating-point scalar, got {total.dtype}")
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ValueError(f"{what}: the weight of a Mean depends on parameters; its gradient would be lost. Detach it")
    if isinstance(weight, Tensor) and weight.ndim:
        raise TypeError(f"{what}: the weight of a Mean must be a scalar, got shape {tuple(weight.shape)}")
    if not isinstance(weight, Tensor):
        weight = torch.full((), weight, device=total.device)  # filled on the device: no copy from the host
    return Mean(total, weight.to(total.device))


def _is_reduction(node: Any) -> bool:
    return isinstance(node, Mean | Sum | Max)


def combine(parts: Sequence[Tree], comms: Communicators | None) -> Tree:
    """One tree from those of the microbatches, `Mean`, `Sum` and `Max` reduced over them and over ranks.

    Any other leaf stays this rank's own: as it is with one microbatch, else stacked [microbatches, ...].
    One all-reduce for all means and sums, and one for all maxima, in float64 for counts and fp32 totals alike.
    """
    flat = [optree.tree_flatten(part, is_leaf=_is_reduction) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise ValueError("aux: microbatches returned trees of different structure")
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for column in columns:
        if isinstance(column[0], Mean):
            means = [as_mean(leaf, "aux") for leaf in column]
            sums += [_total([m.total for m in means]), _total([torch.as_tensor(m.weight) for m in means])]
        elif isinstance(column[0], Sum):
            sums.append(_total([leaf.value for leaf in column]))
        elif isinstance(column[0], Max):
            maxima.append(torch.stack([leaf.value.detach() for leaf in column]).amax(0))
    if comms is not None and not comms.alone:
        sums = _packed(sums, comms.all_reduce_sum)
        maxima = _packed(maxima, comms.all_reduce_max)
    added, largest = iter(sums), iter(maxima)
    out = []
    for column in columns:
        if isinstance(column[0], Mean):
            total, weight = next(added), next(added)
            out.append((total / weight).to(column[0].total.dtype))
        elif isinstance(column[0], Sum):
            dtype = column[0].value.dtype
            out.append(next(added).to(dtype if dtype.is_floating_point else torch.int64))
        elif isinstance(column[0], Max):
            out.append(next(largest).to(column[0].value.dtype))
        elif len(column) == 1 or not isinstance(column[0], Tensor):
            out.append(_detached(column[0]))
        else:
            out.append(torch.stack([leaf.detach() for leaf in column]))
    return optree.tree_unflatten(spec, out)


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.detach().double() for value in values]).sum(0)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _packed(values: list[Tensor], reduce: Any) -> list[Tensor]:
    """Reduces many tensors in one collective."""
    if not values:
        return values
    flat = reduce(torch.cat([value.reshape(-1).double() for value in values]))
    pieces = flat.split([value.numel() for value in values])
    return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]
