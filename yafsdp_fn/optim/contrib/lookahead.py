"""Lookahead, as in Optax (Zhang et al., 2019, arXiv 1907.08610): k steps forward, one step back.

    every step       fast += the optimizer's update
    every k-th one   slow += slow_step_size * (fast - slow);  fast = slow

Optax's parameters are a pair. Here they are the fast ones, at which gradients are taken; the state keeps the slow.
"""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim import (
    Around,
    GradientTransformation,
    as_transformation,
    checked_update,
    needed,
    new_count,
    tree_where,
)
from yafsdp_fn.params import map_trainable


class LookaheadState(NamedTuple):
    """The state of `lookahead`.

    fast_state: of the fast optimizer; steps_since_sync: int32 []; slow: the slow parameters, a tree like the parameters
    """

    fast_state: Any
    steps_since_sync: Tensor
    slow: Any


def lookahead(
    fast_optimizer: Any, sync_period: int, slow_step_size: float, reset_state: bool = False
) -> GradientTransformation:
    """Moves slow parameters by a part of the way of `sync_period` steps of `fast_optimizer`, which goes on from there.

    slow_step_size: that part; reset_state: of the fast optimizer, too, which then begins anew

    It belongs last in a chain: an update that is changed afterwards parts the fast parameters from the slow ones.
    Evaluate, and keep, `lookahead_eval_params(opt_state, params)`. Raises ValueError for a period below 1.

    >>> tx = ya.optim.contrib.lookahead(ya.optim.sgd(0.1), sync_period=2, slow_step_size=0.5)
    >>> opt_state = tx.init(w)
    >>> for _ in range(2):
    ...     updates, opt_state = tx.update(g, opt_state, w)
    ...     w = ya.optim.apply_updates(w, updates)
    >>> w                                                      # half of the way of two steps
    tensor([ 0.7000, -1.6000])
    """
    fast = as_transformation(fast_optimizer)
    if sync_period < 1:
        raise ValueError(f"lookahead: expected a sync_period of at least 1, got {sync_period}")

    def init(params: Any) -> Any:
        return LookaheadState(fast.init(params), new_count(params), optree.tree_map(torch.clone, params))

    def update(updates: Any, state: LookaheadState, params: Any | None = None) -> tuple[Any, Any]:
        params = needed("lookahead", params)
        steps, fast_state = checked_update(fast, updates, state.fast_state, params)
        syncs = state.steps_since_sync == sync_period - 1
        ahead = optree.tree_map(lambda p, step, slow: p + step - slow, params, steps, state.slow)
        slow = optree.tree_map(lambda slow, way: slow + slow_step_size * way, state.slow, ahead)
        back = optree.tree_map(lambda step, way: step - (1 - slow_step_size) * way, steps, ahead)
        if reset_state:
            fast_state = tree_where(syncs, fast.init(params), fast_state)
        since = ((state.steps_since_sync + 1) % sync_period).to(state.steps_since_sync.dtype)
        return tree_where(syncs, back, steps), LookaheadState(fast_state, since, tree_where(syncs, slow, state.slow))

    return GradientTransformation(init, update, fast.elementwise, Around(fast))


def lookahead_eval_params(state: LookaheadState, params: Any) -> Any:
    """Returns the slow parameters, to evaluate and to keep, from the state of `lookahead` and its parameters. Frozen
    leaves stay as they are.

    state: that of `lookahead` itself, as for `schedule_free_eval_params`. Raises TypeError for another.

    >>> tx = ya.optim.contrib.lookahead(ya.optim.sgd(0.1), sync_period=2, slow_step_size=0.5)
    >>> updates, opt_state = tx.update(g, tx.init(w), w)       # the fast parameters have moved, the slow ones have not
    >>> ya.optim.contrib.lookahead_eval_params(opt_state, ya.optim.apply_updates(w, updates))
    tensor([ 1., -2.])
    """
    if not isinstance(state, LookaheadState):
        raise TypeError(
            f"lookahead_eval_params: expected a LookaheadState, got {type(state).__name__}; of a chain pass the part "
            "of its state that is lookahead's, of a sharded state `state.opt_state`"
        )
    return map_trainable(lambda fast, slow: slow.clone(), params, state.slow)
