"""Optax's names and semantics on torch tensors.

    tx = chain(clip_by_global_norm(1.0), adamw(warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)))

base.py        the protocol (init, update), chain, assume_elementwise
adamw.py, sgd.py, clipping.py, masking.py, scaling.py    the transformations, each pure
rates.py       learning rates by count
units.py       the same update in place, whole or unit by unit: definition.py, fused.py (torch's fused kernels)
"""

from yafsdp_fn.optim.adamw import ScaleByAdamState, adam, adamw, scale_by_adam
from yafsdp_fn.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    as_transformation,
    assume_elementwise,
    chain,
    check,
    identity,
)
from yafsdp_fn.optim.clipping import clip_by_global_norm
from yafsdp_fn.optim.masking import MaskedState, add_decayed_weights, masked
from yafsdp_fn.optim.rates import (
    Rate,
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_linear_decay_schedule,
)
from yafsdp_fn.optim.scaling import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from yafsdp_fn.optim.sgd import TraceState, sgd, trace
from yafsdp_fn.optim.units import UnitSteps, needs_norm, step_, why_not_unitwise

__all__ = [
    "EmptyState",
    "GradientTransformation",
    "MaskedState",
    "Rate",
    "ScaleByAdamState",
    "ScaleByScheduleState",
    "TraceState",
    "UnitSteps",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "as_transformation",
    "assume_elementwise",
    "chain",
    "check",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "identity",
    "join_schedules",
    "linear_schedule",
    "masked",
    "needs_norm",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "step_",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_linear_decay_schedule",
    "why_not_unitwise",
]
