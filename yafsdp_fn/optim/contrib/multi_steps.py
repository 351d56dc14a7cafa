"""One optimizer step for several gradients, as in Optax's `MultiSteps`:

    mean += (gradient - mean) / (mini_step + 1)
    every k-th time:  update, inner state = inner optimizer(mean);  mean = 0
    else:             update = 0, the inner state stays

Only the device knows which of the two a step is, since steps skipped there are not counted. So the inner optimizer
is computed every time, and thrown away k - 1 times out of k. `train_step(microbatches=k)` has the same gradients in
one step, without that, and without memory for the mean; this is for steps that cannot be one, or for a changing k.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim import Around, GradientTransformation, as_transformation, checked_update, new_count, tree_where


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`.

    mini_step: int32 [], gradients in the mean; gradient_step: int32 [], steps of the inner optimizer
    inner_opt_state: its state; acc_grads: the mean, or sum, a tree like the parameters
    """

    mini_step: Tensor
    gradient_step: Tensor
    inner_opt_state: Any
    acc_grads: Any


def multi_steps(
    opt: Any,
    every_k_schedule: int | Callable[[Tensor], Any],
    use_grad_mean: bool = True,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Applies `opt` to the mean of k gradients, every k-th step; updates are zero in between.

    every_k_schedule: k, at least 1, or a function of `gradient_step`, an int32 [] that the host should not read
    use_grad_mean: False for the sum; accumulator_dtype: of the mean or sum, default float32, float64 for parameters in
        float64

    A step skipped because it is not finite has no effect: the mean keeps its bits. (Optax has `should_skip_update_fn`
    for that.) `state.mini_step == 0` after a step means that `opt` has taken one. Raises ValueError if k is a number
    below 1.

    >>> tx = ya.optim.contrib.multi_steps(ya.optim.sgd(0.1), every_k_schedule=2)
    >>> first, opt_state = tx.update(g, tx.init(w), w)
    >>> second, _ = tx.update(g, opt_state, w)
    >>> first, second
    (tensor([0., 0.]), tensor([-0.3000,  0.4000]))
    """
    tx = as_transformation(opt)
    if not callable(every_k_schedule) and every_k_schedule < 1:
        raise ValueError(f"multi_steps: expected a number of gradients of at least 1, got {every_k_schedule}")

    def init(params: Any) -> Any:
        def mean(p: Tensor) -> Tensor:
            return torch.zeros_like(p, dtype=accumulator_dtype or torch.promote_types(p.dtype, torch.float32))

        return MultiStepsState(new_count(params), new_count(params), tx.init(params), optree.tree_map(mean, params))

    def update(updates: Any, state: MultiStepsState, params: Any | None = None) -> tuple[Any, Any]:
        mini, k = state.mini_step, every_k_schedule
        k = k(state.gradient_step) if callable(k) else k
        emit = mini == k - 1

        def gathered(g: Tensor, acc: Tensor) -> Tensor:
            return (acc + (g - acc) / (mini + 1) if use_grad_mean else acc + g).to(acc.dtype)

        acc = optree.tree_map(gathered, updates, state.acc_grads)
        given = optree.tree_map(lambda mean, g: mean.to(g.dtype), acc, updates)
        steps, inner = checked_update(tx, given, state.inner_opt_state, params)
        after = MultiStepsState(
            mini_step=((mini + 1) % k).to(mini.dtype),
            gradient_step=state.gradient_step + emit,
            inner_opt_state=tree_where(emit, inner, state.inner_opt_state),
            acc_grads=tree_where(emit, optree.tree_map(torch.zeros_like, acc), acc),
        )
        return tree_where(emit, steps, optree.tree_map(torch.zeros_like, steps)), after

    return GradientTransformation(init, update, tx.elementwise, Around(tx))
