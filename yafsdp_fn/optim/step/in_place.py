"""step_: one step of an optimizer in place, for a loop of one's own."""

from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.optim.base import OnWrite, State
from yafsdp_fn.optim.step.units import UnitSteps
from yafsdp_fn.params.tree import Tree


@torch.no_grad()
def step_(
    tx: Any,
    params: Tree,
    grads: Tree,
    opt_state: State,
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    on_write: OnWrite = lambda: None,
    copies: Tree | None = None,
) -> State:
    """Takes one full step in place: updates `params` and `opt_state`, and returns the latter. `grads` are overwritten.

    scale: 0-dim, divides every gradient; None for 1
    found_inf: 0-dim; if it is 1, parameters and state (its counts too) keep their bits. Never read by the host
    grad_norm: 0-dim, the global norm of `grads / scale`, if it is known
    on_write: called before the first write to parameters or state; an exception before it leaves both as they were
    copies: of `params` in another dtype, which get their new values

    >>> opt_state = ya.optim.step_(ya.optim.sgd(0.1), w, g, ya.optim.sgd(0.1).init(w))
    >>> w                                                      # written in place
    tensor([ 0.7000, -1.6000])
    """
    steps = UnitSteps(tx, params, grads, opt_state, copies)
    steps.run(scale=scale, found_inf=found_inf, grad_norm=grad_norm, on_write=on_write)
    return steps.finish(found_inf)
