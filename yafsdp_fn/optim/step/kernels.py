"""Maps sequences of rules to torch's fused kernels, which take a step in one pass.

scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
[add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
[add_decayed_weights], [trace], scale           ->  torch._fused_sgd_
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import Stage
from yafsdp_fn.optim.partition import Decay
from yafsdp_fn.optim.rules import Adam, Momentum, ScaleByAdamState
from yafsdp_fn.optim.scaling import Scale
from yafsdp_fn.optim.step.definition import Lane
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.util.torch_private import fused_adam, fused_adamw, fused_sgd

Leaves = list[Tensor]


class Fusion(NamedTuple):
    """A sequence of rules that one kernel implements.

    kernel: torch's, `(params, grads, *moments, [], [count] * len(params), lr=, weight_decay=, grad_scale=, found_inf=,
        maximize=, **settings)`; without a count, `(params, grads, *moments or [], ...)`
    moments: trees that it updates beside the parameters
    taken: completed steps, if it is Adam's
    """

    kernel: Callable[..., None]
    settings: dict[str, Any]
    moments: tuple[Tree, ...]
    taken: Tensor | None = None

    def columns(self, lane: Lane) -> list[Leaves] | None:
        """Returns the leaves of parameters, gradients, moments and copies, or None if the kernel does not accept them.

        It reads raw memory of parameters and moments, of one dtype, in one order.
        """
        spec = optree.tree_structure(lane.params)
        trees = [lane.params, lane.grads, *self.moments]
        if lane.copies is not None:
            trees.append(lane.copies)
        columns: list[Leaves] = [spec.flatten_up_to(tree) for tree in trees]  # type: ignore[misc]
        kinds: set[tuple[torch.device, torch.dtype]] = set()
        for param, *moments in zip(columns[0], *columns[2 : 2 + len(self.moments)], strict=True):
            for leaf in (param, *moments):
                if not leaf.is_contiguous() or leaf.shape != param.shape:
                    return None
                kinds.update((here.device, here.dtype) for here in lane.host.get(id(leaf), [leaf]))
        if len(kinds) != 1:
            return None
        ((device, dtype),) = kinds
        if device.type == "cpu":
            # in torch 2.13 that of SGD leaves all but the last few elements as they are (issue 191763)
            accepted = self.taken is not None or dtype.itemsize >= 4
        else:  # rates and powers of betas would be in float32
            accepted = device.type == "cuda" and dtype != torch.float64
        return columns if accepted else None


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """Returns the kernel for these rules, or None."""
    rules = [tx.rule for tx, _ in stages]
    states = [state for _, state in stages]
    match rules:
        case [Adam() as rule, Scale()] | [Adam() as rule, Decay(), Scale()]:
            return _adam(fused_adamw, rule, states[0])
        case [Decay(), Adam() as rule, Scale()]:
            return _adam(fused_adam, rule, states[1])
        case [Momentum() as momentum, Scale()] | [Decay(), Momentum() as momentum, Scale()] if momentum.decay > 0:
            return _sgd(momentum, states[-2].trace)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(Momentum(0.0, False))
    return None


def _adam(kernel: Callable[..., None], rule: Adam, state: ScaleByAdamState) -> Fusion:
    settings = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps, "amsgrad": False}
    return Fusion(kernel, settings, (state.mu, state.nu), state.count)


def _sgd(rule: Momentum, *moments: Tree) -> Fusion:
    settings = {"momentum": rule.decay, "nesterov": rule.nesterov, "dampening": 0.0, "is_first_step": False}
    return Fusion(fused_sgd, settings, moments)
