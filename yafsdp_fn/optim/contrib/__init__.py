"""Transformations of Optax's that are seldom asked for, each one file that needs public names alone.

Whoever writes an optimizer of their own, elementwise, of whole leaves or around another one, finds its like here.
"""

from yafsdp_fn.optim.contrib.adafactor import (
    adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from yafsdp_fn.optim.contrib.apply_if_finite import ApplyIfFiniteState, apply_if_finite
from yafsdp_fn.optim.contrib.centralize import centralize
from yafsdp_fn.optim.contrib.inject_hyperparams import InjectHyperparamsState, inject_hyperparams
from yafsdp_fn.optim.contrib.lamb import lamb, scale_by_trust_ratio
from yafsdp_fn.optim.contrib.lookahead import LookaheadState, lookahead, lookahead_eval_params
from yafsdp_fn.optim.contrib.multi_steps import MultiStepsState, multi_steps
from yafsdp_fn.optim.contrib.noise import AddNoiseState, add_noise
from yafsdp_fn.optim.contrib.schedule_free import (
    ScheduleFreeState,
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
    schedule_free_sgd,
)
from yafsdp_fn.optim.contrib.soap import scale_by_soap, soap

__all__ = [
    "AddNoiseState",
    "ApplyIfFiniteState",
    "InjectHyperparamsState",
    "LookaheadState",
    "MultiStepsState",
    "ScheduleFreeState",
    "adafactor",
    "add_noise",
    "apply_if_finite",
    "centralize",
    "clip_by_block_rms",
    "inject_hyperparams",
    "lamb",
    "lookahead",
    "lookahead_eval_params",
    "multi_steps",
    "scale_by_factored_rms",
    "scale_by_param_block_rms",
    "scale_by_soap",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "schedule_free_sgd",
    "soap",
]
