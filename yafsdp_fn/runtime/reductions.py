"""The results of a loss: values that are combined over microbatches and ranks.

    Mean(total, weight)   sum of totals / sum of weights: right for masked and uneven batches
    Sum(value), Max(value)

A bare scalar loss is `Mean(value, 1)`: parts count equally.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.communication.sums import apart, in_order
from yafsdp_fn.params.one_state import check, marks
from yafsdp_fn.params.tree import Tree, shape_of

# ---- What a loss may return.


class Mean(NamedTuple):
    """A weighted mean over microbatches and ranks.

    total: a scalar tensor, in aux of any shape
    weight: a number or a tensor, scalar or of the total's shape, that does not depend on parameters

    >>> def loss(w, batch):                                     # each microbatch has its share of the elements
    ...     return ya.Mean((w * batch).sum(), batch.numel())
    >>> ya.value_and_grad(loss, microbatches=2)(torch.ones(()), torch.tensor([1.0, 3.0]))
    (tensor(2.), tensor(2.))
    """

    total: Tensor
    weight: Tensor | float


class Sum(NamedTuple):
    """A tensor or a number to add up over microbatches and ranks; integers and booleans become int64.

    >>> def loss(params, batch):
    ...     return loss_fn(params, batch), {"tokens": ya.Sum(batch["targets"].ge(0).sum())}
    >>> ya.eval_step(loss, has_aux=True, microbatches=2)(state, batch)["aux"]
    {'tokens': tensor(32)}
    """

    value: Tensor | float


class Max(NamedTuple):
    """A tensor or a number to reduce to its elementwise maximum over microbatches and ranks.

    >>> def loss(params, batch):
    ...     return loss_fn(params, batch), {"largest": ya.Max(batch["tokens"].amax())}
    >>> ya.eval_step(loss, has_aux=True, microbatches=2)(state, batch)["aux"]
    {'largest': tensor(15)}
    """

    value: Tensor | float


WEIGHT_DEPENDS = "the weight of a Mean depends on parameters; its gradient would be lost. Detach it"


# ---- Checks.


def as_mean(loss: Any, depends: Callable[[Tensor], bool] = lambda weight: weight.requires_grad) -> Mean:
    """Checks the result of a loss function, and returns it as a `Mean` whose weight is a tensor on the total's device,
    without a graph.

    depends: returns whether a weight depends on the differentiated arguments
    """
    mean = loss if isinstance(loss, Mean) else Mean(loss, 1.0)
    if not isinstance(mean.total, Tensor) or mean.total.ndim:
        got = shape_of(mean.total)
        raise TypeError(f"the loss: expected a scalar tensor or ya.Mean of one, got {got}; with aux, pass has_aux=True")
    weight = mean.weight
    if isinstance(weight, Tensor) and weight.requires_grad:
        if depends(weight):
            raise ValueError(f"the loss: {WEIGHT_DEPENDS}")
        mean = mean._replace(weight=weight.detach())
    return _checked(mean, "the loss")


def _checked(mean: Mean, what: str) -> Mean:
    total, weight = mean
    if not isinstance(total, Tensor) or not total.is_floating_point():
        raise TypeError(f"{what}: the total of a Mean should be a floating-point tensor, got {shape_of(total)}")
    if isinstance(weight, Real):
        # filled on the device: no copy from the host
        weight = torch.full((), float(weight), dtype=torch.float64, device=total.device)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{what}: the weight of a Mean should be a number or a tensor, got {shape_of(weight)}")
    if weight.ndim and weight.shape != total.shape:
        got = f"{tuple(total.shape)}, got {tuple(weight.shape)}"
        raise TypeError(f"{what}: the weight of a Mean should be a scalar or have its total's shape {got}")
    return Mean(total, weight.to(total.device))


def is_reduction(node: Any) -> bool:
    return isinstance(node, Mean | Sum | Max)


def of_tensors(aux: Tree, device: torch.device) -> Tree:
    """Returns `aux` with a tensor on `device` for each number in a `Sum` or `Max`. TypeError for other values."""

    def of_tensor(node: Any) -> Any:
        if not isinstance(node, Sum | Max) or (isinstance(node.value, Tensor) and not node.value.is_complex()):
            return node
        if not isinstance(node.value, int | float):
            name = type(node).__name__
            raise TypeError(f"aux: expected a real tensor or number in ya.{name}, got {shape_of(node.value)}")
        return type(node)(torch.full((), node.value, device=device))

    return optree.tree_map(of_tensor, aux, is_leaf=is_reduction)


# ---- Over microbatches and ranks.


def combine(results: Sequence[Tree], comms: Ranks | None) -> Tree:
    """Returns one tree from those of the microbatches, `Mean`, `Sum` and `Max` reduced over them and over ranks.

    Any other leaf stays this rank's own: unchanged with one microbatch, else stacked [microbatches, ...]. Uses one
    all-reduce for all means and sums, and one for all maxima, in float64 for counts and fp32 totals alike. On a
    deterministic mesh means and sums are those of micro-shards, added up in their order.
    """
    ordered: Any = comms if comms is not None and comms.deterministic else None
    flat = [optree.tree_flatten(result, is_leaf=is_reduction) for result in results]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("aux: microbatches returned trees of different structure")
    # over microbatches: a column has the same leaf of each
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for column in columns:
        if not is_reduction(column[0]):
            continue
        checked = [_checked(leaf, "aux") if isinstance(leaf, Mean) else leaf for leaf in column]
        for values in zip(*checked, strict=True):
            tensors = [value.detach() for value in values]
            if isinstance(column[0], Max):
                maxima.append(torch.stack(tensors).amax(0))
                continue
            stacked = torch.stack(tensors).double()
            # of a deterministic mesh [G, ...], a value of each micro-shard, once summed over ranks
            sums.append(stacked.sum(0) if ordered is None else apart(stacked, ordered, ordered.world_rank))
    # over ranks
    if comms is not None and not comms.alone:
        sums, maxima = _packed(sums, comms.all_reduce_sum), _packed(maxima, comms.all_reduce_max)
    if ordered is not None:
        sums = [in_order(value) for value in sums]
    # back into the tree
    added, largest, out = iter(sums), iter(maxima), list[Any]()
    for column in columns:
        match column[0]:
            case Mean(total):
                out.append((next(added) / next(added)).to(total.dtype))
            case Sum(value):
                dtype = torch.as_tensor(value).dtype
                out.append(next(added).to(dtype if dtype.is_floating_point else torch.int64))
            case Max(value):
                out.append(next(largest).to(torch.as_tensor(value).dtype))
            case Tensor() as tensor:
                out.append(tensor.detach() if len(column) == 1 else torch.stack(column).detach())
            case other:
                out.append(other)
    return optree.tree_unflatten(flat[0][1], out)


def _packed(values: list[Tensor], reduce: Any) -> list[Tensor]:
    """Reduces many tensors in one collective."""
    if not values:
        return values
    flat = reduce(torch.cat([value.reshape(-1).double() for value in values]))
    reduced: list[Tensor] = []
    start = 0
    for value in values:
        reduced.append(flat[start : start + value.numel()].view(value.shape))
        start += value.numel()
    return reduced


# ---- Gradients and metrics of a step.


def divided(grads: Sequence[Tensor | None], weight: Tensor) -> list[Tensor | None]:
    """Returns gradients of a mean from those of its total."""
    return [None if grad is None else (grad / weight).to(grad.dtype) for grad in grads]


def shapes_in(aux: Tree) -> str:
    """Returns the shapes of the tensors in what a loss returns beside the total, () for all else."""
    return str(optree.tree_map(lambda leaf: tuple(getattr(leaf, "shape", ())), aux))


def combined(
    losses: Sequence[Mean],
    aux: Sequence[Tree],
    ranks: Ranks | None,
    squares: Tensor | None = None,
    own: str = "",
) -> Any:
    """Returns `((total, weight), aux)` over microbatches and ranks; with `squares`, a pair of that and its sum over
    ranks. Raises RanksDisagree if ranks have used other states than `own`, as far as is known yet."""
    comms = ranks if isinstance(ranks, Communicators) and not ranks.alone else None
    # beside the results, in the same collective: squares of gradients, and marks of the state
    once = [] if squares is None else [squares]
    if comms is not None:
        once.append(marks(own, losses[0].total.device))
    if len(aux) > 1 and len(outlines := set(map(shapes_in, aux))) > 1:
        raise ValueError(
            f"aux: microbatches returned the shapes {' and '.join(sorted(outlines))}; each must return the same "
            "leaves, of the same shapes (ya.Sum and ya.Mean of totals add them up)"
        )
    results: list[Tree] = []
    for number, (loss, of_loss) in enumerate(zip(losses, aux, strict=True)):
        mean = Sum(loss.total.double()), Sum(torch.as_tensor(loss.weight, device=loss.total.device).double())
        beside = [Sum(x if number == 0 else torch.zeros_like(x)) for x in once]
        results.append(((mean, of_loss), beside))
    found, sums = combine(results, ranks)
    if comms is not None:
        check(sums[-1], own, comms)
    return found if squares is None else (found, sums[0])
