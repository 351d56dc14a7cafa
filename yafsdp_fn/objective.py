"""ya.objective: a loss as torch.func takes it, one number; its gradient is the one that a step descends.

def objective(fun)(*args):
    total, weight = fun(*args)
    return sum over ranks of total / sum over ranks of weight

What gradients mean, at every number of ranks: comm/differentiable.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.differentiable import SumOfRanks
from yafsdp_fn.engine.randomness import in_step
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.reductions import as_mean

NOT_HERE = (
    "ya.objective on a deterministic mesh: it is of all micro-shards of a rank at once. Use ya.value_and_grad, "
    "ya.eval_step or ya.train_step, or a mesh without deterministic"
)


def objective(fun: Callable[..., Any]) -> Callable[..., Tensor]:
    """`fun(params, batch, ...)` -> a scalar tensor or `ya.Mean`, as a function that returns the global weighted mean.

    The value, a 0-dim tensor in the dtype of the total, is the same on every rank: the one of `ya.value_and_grad`
    without microbatches. `torch.func.grad(ya.objective(fun))` and all other transforms are of it; a bare `fun` is
    differentiated as the mean over ranks of what each returns, whatever the weights. Every rank must call it.

    Ranks are those of the first sharded argument; without one, the value is this process's own.
    """

    def mean(*args: Any, **kwargs: Any) -> Tensor:
        total, weight = as_mean(fun(*args, **kwargs))
        found = handles((args, kwargs))
        both = torch.stack([total.double(), torch.as_tensor(weight, device=total.device).double()])
        if found and found[0].owner.comms.deterministic:
            raise RuntimeError(NOT_HERE)
        if found and not found[0].owner.comms.alone:
            both = SumOfRanks.apply(found[0].owner.comms, both, in_step())  # type: ignore[no-untyped-call]
        return (both[0] / both[1]).to(total.dtype)

    return mean
