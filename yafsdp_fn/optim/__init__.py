"""Optax's names and semantics on torch tensors.

    tx = chain(clip_by_global_norm(1.0), adamw(warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)))

base.py                               the protocol (init, update), chain, assume_elementwise
rules, scaling, partition, noise      the transformations, each pure; learning rates by count
adafactor, muon, soap, leafwise       those of whole leaves, each at its owner (leafwise.py)
schedule_free, wrappers               around others: averages, accumulation, hyperparameters in the state
step/                                 the same update in place, whole or unit by unit: units.py, fused.py, definition.py
"""

from yafsdp_fn.optim.adafactor import (
    adafactor,
    centralize,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from yafsdp_fn.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    as_transformation,
    assume_elementwise,
    chain,
    identity,
)
from yafsdp_fn.optim.leafwise import LeafwiseState, assume_leafwise
from yafsdp_fn.optim.muon import layer_matrices, mean_momentum, muon, newton_schulz, orthogonalize
from yafsdp_fn.optim.noise import AddNoiseState, add_noise
from yafsdp_fn.optim.partition import MaskedState, PartitionState, add_decayed_weights, masked, partition
from yafsdp_fn.optim.rules import (
    ScaleByAdamState,
    ScaleByLionState,
    TraceState,
    adam,
    adamw,
    lion,
    scale_by_adam,
    scale_by_lion,
    sgd,
    trace,
)
from yafsdp_fn.optim.scaling import (
    Rate,
    ScaleByScheduleState,
    clip_by_global_norm,
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_linear_decay_schedule,
)
from yafsdp_fn.optim.schedule_free import (
    ScaleByRmsState,
    ScaleByRmsWithCountState,
    ScheduleFreeState,
    scale_by_rms,
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
    schedule_free_sgd,
)
from yafsdp_fn.optim.soap import scale_by_soap, soap
from yafsdp_fn.optim.step.units import UnitSteps, needs_norm, parts_of, step_, why_not_unitwise
from yafsdp_fn.optim.wrappers import InjectHyperparamsState, MultiStepsState, inject_hyperparams, multi_steps

__all__ = [
    "AddNoiseState",
    "EmptyState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LeafwiseState",
    "MaskedState",
    "MultiStepsState",
    "PartitionState",
    "Rate",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByRmsState",
    "ScaleByRmsWithCountState",
    "ScaleByScheduleState",
    "ScheduleFreeState",
    "TraceState",
    "UnitSteps",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "as_transformation",
    "assume_elementwise",
    "assume_leafwise",
    "centralize",
    "chain",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "identity",
    "inject_hyperparams",
    "join_schedules",
    "layer_matrices",
    "linear_schedule",
    "lion",
    "masked",
    "mean_momentum",
    "multi_steps",
    "muon",
    "needs_norm",
    "newton_schulz",
    "orthogonalize",
    "partition",
    "parts_of",
    "scale",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_param_block_rms",
    "scale_by_rms",
    "scale_by_schedule",
    "scale_by_soap",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "schedule_free_sgd",
    "sgd",
    "soap",
    "step_",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_linear_decay_schedule",
    "why_not_unitwise",
]
