"""Several gradients to one step, as in Optax's `MultiSteps`:

    mean += (gradient - mean) / (mini_step + 1)
    every k-th time:  update, inner state = inner optimizer(mean);  mean = 0
    else:             update = 0, the inner state stays

Which of the two a step is only the device knows: a step that is skipped there is not counted. So the inner optimizer is
worked out every time, and thrown away k - 1 times out of k. `train_step(microbatches=k)` has the same gradients in one
step, without that, and without memory for the mean; this is for steps that cannot be one, or for a k that changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.around import Around
from yafsdp_fn.optim.base import GradientTransformation, State, as_transformation, new_count
from yafsdp_fn.params.tree import Tree


class MultiStepsState(NamedTuple):
    """mini_step: int32 [], gradients in the mean; gradient_step: int32 [], steps of the inner optimizer
    inner_opt_state: its state; acc_grads: the mean, or sum, a tree like the parameters
    """

    mini_step: Tensor
    gradient_step: Tensor
    inner_opt_state: State
    acc_grads: Tree


def multi_steps(
    opt: Any,
    every_k_schedule: int | Callable[[Tensor], Any],
    use_grad_mean: bool = True,
    accumulator_dtype: torch.dtype = torch.float32,
) -> GradientTransformation:
    """`opt` on the mean of k gradients, every k-th step; updates are zero in between.

    every_k_schedule: k, at least 1, or a function of `gradient_step`, an int32 [] that the host should not read
    use_grad_mean: False for the sum; accumulator_dtype: of the mean or sum

    A step that is skipped since it is not finite is as if it had not been: the mean keeps its bits. (Optax has
    `should_skip_update_fn` for that.) `state.mini_step == 0` after a step says that `opt` has taken one.
    Raises ValueError where k is a number below 1.
    """
    tx = as_transformation(opt)
    if not callable(every_k_schedule) and every_k_schedule < 1:
        raise ValueError(f"multi_steps: expected a number of gradients of at least 1, got {every_k_schedule}")

    def init(params: Tree) -> State:
        mean = optree.tree_map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype), params)
        return MultiStepsState(new_count(params), new_count(params), tx.init(params), mean)

    def update(updates: Tree, state: MultiStepsState, params: Tree | None = None) -> tuple[Tree, State]:
        mini, k = state.mini_step, every_k_schedule
        k = k(state.gradient_step) if callable(k) else k
        emit = mini == k - 1

        def gathered(g: Tensor, acc: Tensor) -> Tensor:
            return (acc + (g - acc) / (mini + 1) if use_grad_mean else acc + g).to(acc.dtype)

        def where(yes: Any, no: Any) -> Any:
            return torch.where(emit, yes, no).to(no.dtype) if isinstance(yes, Tensor) else yes

        acc = optree.tree_map(gathered, updates, state.acc_grads)
        given = optree.tree_map(lambda mean, g: mean.to(g.dtype), acc, updates)
        steps, inner = tx.update(given, state.inner_opt_state, params)
        after = MultiStepsState(
            mini_step=((mini + 1) % k).to(mini.dtype),
            gradient_step=state.gradient_step + emit,
            inner_opt_state=optree.tree_map(where, inner, state.inner_opt_state),
            acc_grads=optree.tree_map(lambda mean: where(torch.zeros_like(mean), mean), acc),
        )
        return optree.tree_map(lambda step: where(step, torch.zeros_like(step)), steps), after

    return GradientTransformation(init, update, tx.elementwise, Around(tx))
