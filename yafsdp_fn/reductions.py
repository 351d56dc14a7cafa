"""What a loss returns: values that know how to be combined over microbatches and ranks.

    Mean(total, weight)   sum of totals / sum of weights: masked and uneven batches come out right
    Sum(value), Max(value)

A bare scalar loss is `Mean(value, 1)`: parts count equally.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.params.tree import Tree, shape_of


class Mean(NamedTuple):
    """total: a scalar tensor, in aux of any shape; weight: a number or a tensor, scalar or of the total's shape, that
    does not depend on parameters."""

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
    if not isinstance(mean.total, Tensor) or mean.total.ndim:
        got = shape_of(mean.total)
        raise TypeError(f"{what}: expected a scalar tensor or ya.Mean of one, got {got}; with aux, pass has_aux=True")
    return _checked(mean, what)


def _checked(mean: Mean, what: str) -> Mean:
    total, weight = mean
    if not isinstance(total, Tensor) or not total.is_floating_point():
        raise TypeError(f"{what}: the total of a Mean should be a floating-point tensor, got {shape_of(total)}")
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ValueError(f"{what}: the weight of a Mean depends on parameters; its gradient would be lost. Detach it")
    if isinstance(weight, Tensor) and weight.ndim and weight.shape != total.shape:
        got = f"{tuple(total.shape)}, got {tuple(weight.shape)}"
        raise TypeError(f"{what}: the weight of a Mean should be a scalar or have its total's shape {got}")
    if not isinstance(weight, Tensor):
        weight = torch.full((), weight, device=total.device)  # filled on the device: no copy from the host
    return Mean(total, weight.to(total.device))


def is_reduction(node: Any) -> bool:
    return isinstance(node, Mean | Sum | Max)


def combine(parts: Sequence[Tree], comms: Ranks | None) -> Tree:
    """One tree from those of the microbatches, `Mean`, `Sum` and `Max` reduced over them and over ranks.

    Any other leaf stays this rank's own: as it is with one microbatch, else stacked [microbatches, ...].
    One all-reduce for all means and sums, and one for all maxima, in float64 for counts and fp32 totals alike.
    """
    flat = [optree.tree_flatten(part, is_leaf=is_reduction) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("aux: microbatches returned trees of different structure")
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for column in columns:
        if isinstance(column[0], Mean):
            means = [_checked(leaf, "aux") for leaf in column]
            sums += [_total([m.total for m in means]), _total([torch.as_tensor(m.weight) for m in means])]
        elif isinstance(column[0], Sum):
            sums.append(_total([leaf.value for leaf in column]))
        elif isinstance(column[0], Max):
            maxima.append(torch.stack([leaf.value.detach() for leaf in column]).amax(0))
    if comms is not None and not comms.alone:
        sums, maxima = _packed(sums, comms.all_reduce_sum), _packed(maxima, comms.all_reduce_max)
    added, largest, out = iter(sums), iter(maxima), []
    for column in columns:
        if isinstance(column[0], Mean):
            total, weight = next(added), next(added)
            out.append((total / weight).to(column[0].total.dtype))
        elif isinstance(column[0], Sum):
            dtype = column[0].value.dtype
            out.append(next(added).to(dtype if dtype.is_floating_point else torch.int64))
        elif isinstance(column[0], Max):
            out.append(next(largest).to(column[0].value.dtype))
        elif isinstance(column[0], Tensor):
            out.append(column[0].detach() if len(column) == 1 else torch.stack(column).detach())
        else:
            out.append(column[0])
    return optree.tree_unflatten(flat[0][1], out)


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.detach().double() for value in values]).sum(0)


def _packed(values: list[Tensor], reduce: Any) -> list[Tensor]:
    """Reduces many tensors in one collective."""
    if not values:
        return values
    flat = reduce(torch.cat([value.reshape(-1).double() for value in values]))
    pieces = flat.split([value.numel() for value in values])
    return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]
