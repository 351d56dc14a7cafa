"""Sequences of rules that torch has a fused kernel for:

    scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
    [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
    [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_

How a step goes through one: fused.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

from yafsdp_fn.optim.adamw import Adam, ScaleByAdamState
from yafsdp_fn.optim.base import Stage
from yafsdp_fn.optim.masking import Decay
from yafsdp_fn.optim.scaling import Scale
from yafsdp_fn.optim.sgd import Momentum
from yafsdp_fn.optim.step import copying
from yafsdp_fn.optim.step.fused import Fusion
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.torch_private import fused_adam, fused_adamw, fused_sgd


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """The kernel for these rules, if there is one."""
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as adam, Scale()] | [Adam() as adam, Decay(), Scale()]:
            return _adam(fused_adamw, stages, adam, states[0], decoupled=True)
        case [Decay(), Adam() as adam, Scale()]:
            return _adam(fused_adam, stages, adam, states[1], decoupled=False)
        case [Momentum() as rule, Scale()] | [Decay(), Momentum() as rule, Scale()] if rule.decay > 0:
            return _sgd(stages, (states[-2].trace,), rule.decay, rule.nesterov)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(stages, (), 0.0, False)
    return None


def _adam(
    kernel: Callable[..., None], stages: Sequence[Stage], rule: Adam, state: ScaleByAdamState, *, decoupled: bool
) -> Fusion:
    settings = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps, "amsgrad": False}
    with_copies = copying.of(rule, state.count.device, decoupled=decoupled)
    return Fusion(stages, (state.mu, state.nu), kernel, settings, state.count, with_copies)


def _sgd(stages: Sequence[Stage], moments: tuple[Tree, ...], momentum: float, nesterov: bool) -> Fusion:
    rule: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "is_first_step": False}
    # in torch 2.13 it leaves all but the last few elements as they are (pytorch issue 191763)
    return Fusion(stages, moments, fused_sgd, rule, lossy=True)
