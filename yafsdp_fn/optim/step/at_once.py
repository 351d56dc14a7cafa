"""One whole step of all units, on trees that nobody keeps: what `UnitSteps` is for any number of steps."""

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
    """One whole step of `UnitSteps`: updates `params` and `opt_state` in place, and returns the latter."""
    steps = UnitSteps(tx, params, grads, opt_state, copies)
    steps.run(scale=scale, found_inf=found_inf, grad_norm=grad_norm, on_write=on_write)
    return steps.finish(found_inf)
