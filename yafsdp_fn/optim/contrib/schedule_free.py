"""Schedule-free learning, as in Optax's contrib (Defazio et al., 2024, arXiv 2405.15682). Three sequences:

    y    the parameters, at which gradients are taken         y = (1 - b1) * z + b1 * x
    z    the state, which the base optimizer steps            z += base update
    x    the average of the z so far, to be evaluated         x = (1 - c) * x + c * z

x is not kept: y and z determine it. c is this step's share of the sum of all weights so far; a weight is the largest
rate so far, raised to `weight_lr_power`. So c is 1 / step if the rate is constant.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim import (
    Around,
    GradientTransformation,
    Rate,
    add_decayed_weights,
    as_transformation,
    chain,
    checked_update,
    needed,
    new_count,
    scale_by_learning_rate,
    scale_by_rms,
    warmup_constant_schedule,
)
from yafsdp_fn.params import map_trainable


class ScheduleFreeState(NamedTuple):
    """The state of `schedule_free`.

    b1: [], as given; weight_sum, max_lr: [], of the steps so far, all float32 (float64 for float64 parameters)
    step_count: int32 [], one more than the completed steps; base_optimizer_state: of the optimizer that steps z
    z: a tree like the parameters
    """

    b1: Tensor
    weight_sum: Tensor
    step_count: Tensor
    max_lr: Tensor
    base_optimizer_state: Any
    z: Any


def schedule_free(
    base_optimizer: Any,
    learning_rate: float | Rate,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Wraps `base_optimizer`, which should have no momentum, with averaging in place of momentum and of a decaying
    rate.

    learning_rate: that of `base_optimizer`, maybe with a warm-up; here it sets the weight of a step in the average
    b1: how near to the average gradients are taken, in (0, 1]
    state_dtype: of z, default the parameters'

    Evaluate, and keep, `schedule_free_eval_params(opt_state, params)`. Raises ValueError for another b1.

    >>> tx = ya.optim.contrib.schedule_free(ya.optim.sgd(0.1), learning_rate=0.1)
    >>> updates, opt_state = tx.update(g, tx.init(w), w)
    >>> updates
    tensor([-0.3000,  0.4000])
    """
    base = as_transformation(base_optimizer)
    if not 0 < b1 <= 1:
        raise ValueError(
            f"schedule_free: expected b1 in (0, 1], got {b1}: the average is made from y by dividing by it"
        )

    def init(params: Any) -> Any:
        z = optree.tree_map(lambda p: p.to(state_dtype or p.dtype, copy=True), params)
        count = new_count(params) + 1
        wide = reduce(torch.promote_types, (leaf.dtype for leaf in optree.tree_leaves(params)), torch.float32)
        zero = torch.zeros((), dtype=wide, device=count.device)
        return ScheduleFreeState(torch.full_like(zero, b1), zero, count, zero.clone(), base.init(params), z)

    def update(updates: Any, state: ScheduleFreeState, params: Any | None = None) -> tuple[Any, Any]:
        params = needed("schedule_free", params)
        rate = learning_rate(state.step_count) if callable(learning_rate) else learning_rate
        max_lr = torch.maximum(
            state.max_lr, torch.as_tensor(rate, dtype=state.max_lr.dtype, device=state.max_lr.device)
        )
        weight = max_lr**weight_lr_power
        weight_sum = state.weight_sum + weight
        # 0 / 0 while a warm-up is at zero; a weight that is not finite stays visible
        share = (weight / weight_sum).nan_to_num(nan=0.0, posinf=math.inf)
        share = torch.where(weight.isnan() | weight_sum.isnan(), math.nan, share)
        steps, base_state = checked_update(base, updates, state.base_optimizer_state, params)
        z = optree.tree_map(lambda old, step: (old + step).to(old.dtype), state.z, steps)

        def moved(y: Tensor, old_z: Tensor, new_z: Tensor) -> Tensor:
            x = (1 - share) * _average(y, old_z, b1) + share * new_z
            return b1 * x + (1 - b1) * new_z - y

        after = ScheduleFreeState(state.b1, weight_sum, state.step_count + 1, max_lr, base_state, z)
        return optree.tree_map(moved, params, state.z, z), after

    return GradientTransformation(init, update, base.elementwise, Around(base))


def schedule_free_eval_params(state: ScheduleFreeState, params: Any) -> Any:
    """Returns x, the parameters to evaluate and to keep, from the state of `schedule_free` and its parameters y. Frozen
    leaves stay as they are.

    state: that of `schedule_free` itself: in a chain, it is one of `opt_state`'s parts. Raises TypeError for another.

    >>> tx = ya.optim.contrib.schedule_free(ya.optim.sgd(0.1), 0.1)
    >>> updates, opt_state = tx.update(g, tx.init(w), w)
    >>> ya.optim.contrib.schedule_free_eval_params(opt_state, ya.optim.apply_updates(w, updates))
    tensor([ 0.7000, -1.6000])
    """
    if not isinstance(state, ScheduleFreeState):
        raise TypeError(
            f"schedule_free_eval_params: expected a ScheduleFreeState, got {type(state).__name__}; of a chain pass the "
            "part of its state that is schedule_free's, of a sharded state `state.opt_state`"
        )
    return map_trainable(lambda y, z: _average(y, z, state.b1).to(y.dtype), params, state.z)


def schedule_free_adamw(
    learning_rate: float = 0.0025,
    warmup_steps: int | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_lr_power: float = 2.0,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Schedule-free AdamW, with a linear warm-up of `warmup_steps` if given. It keeps z and a second moment: as much as
    AdamW.

    learning_rate, b2, eps, weight_decay: of `adamw`; the others are those of `schedule_free`

    >>> update(ya.optim.contrib.schedule_free_adamw(0.1))
    tensor([-0.1000,  0.1000])
    """
    rate: float | Rate = learning_rate
    if warmup_steps is not None:
        rate = warmup_constant_schedule(0.0, learning_rate, warmup_steps)
    rms = scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
    base = chain(rms, add_decayed_weights(weight_decay), scale_by_learning_rate(rate))
    return schedule_free(base, rate, b1, weight_lr_power, state_dtype)


def _average(y: Tensor, z: Tensor, b1: Any) -> Tensor:
    x: Tensor = (y - (1 - b1) * z) / b1
    return x
