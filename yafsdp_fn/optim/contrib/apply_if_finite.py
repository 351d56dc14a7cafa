"""Skips steps that are not finite, as in Optax, but not for ever."""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn import global_norm
from yafsdp_fn.optim import Around, GradientTransformation, as_transformation, checked_update, new_count, tree_where


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`.

    notfinite_count: int32 [], steps in a row that were not finite, up to the last; last_finite: bool []
    total_notfinite: int32 [], all of them; inner_state: of the inner transformation
    """

    notfinite_count: Tensor
    last_finite: Tensor
    total_notfinite: Tensor
    inner_state: Any


def apply_if_finite(inner: Any, max_consecutive_errors: int) -> GradientTransformation:
    """Leaves out steps with an infinite element or NaN in the updates, on any rank; after `max_consecutive_errors` of
    them in a row, they are taken.

    `train_step` skips such steps before any transformation sees them, and without a limit: pass `skip_nonfinite=False`
    to leave it to this one. It needs the updates of all units first, so programs with `update=True` refuse it.

    >>> tx = ya.optim.contrib.apply_if_finite(ya.optim.sgd(0.1), max_consecutive_errors=3)
    >>> updates, opt_state = tx.update(g / 0, tx.init(w), w)
    >>> updates, opt_state.notfinite_count
    (tensor([0., 0.]), tensor(1, dtype=torch.int32))
    """
    tx = as_transformation(inner)

    def init(params: Any) -> Any:
        count = new_count(params)
        return ApplyIfFiniteState(count, torch.ones_like(count, dtype=torch.bool), count.clone(), tx.init(params))

    def update(updates: Any, state: ApplyIfFiniteState, params: Any | None = None) -> tuple[Any, Any]:
        # a norm of flags is a sum over all ranks of what each has; one of updates may overflow
        finite = global_norm(optree.tree_map(lambda u: u.isfinite().logical_not().to(u.dtype), updates)) == 0
        in_row = tree_where(finite, torch.zeros_like(state.notfinite_count), state.notfinite_count + 1)
        takes = finite | (in_row > max_consecutive_errors)
        steps, after = checked_update(tx, updates, state.inner_state, params)
        total = tree_where(finite, state.total_notfinite, state.total_notfinite + 1)
        kept = ApplyIfFiniteState(in_row, finite, total, tree_where(takes, after, state.inner_state))
        return tree_where(takes, steps, optree.tree_map(torch.zeros_like, steps)), kept

    why = "apply_if_finite looks at the updates of all units first"
    return GradientTransformation(init, update, tx.elementwise, Around(tx, why))
