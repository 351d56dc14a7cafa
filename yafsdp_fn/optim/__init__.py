"""Optax's names and semantics on torch tensors.

    tx = chain(clip_by_global_norm(1.0), adamw(warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)))

base.py                         the protocol (init, update), chain, assume_elementwise
rules, scaling, partition       the transformations, each pure; learning rates by count
muon, leafwise                  those of whole leaves, each at its owner (leafwise.py)
in_format, on_host              states in formats, such as moments in 8 bits, and in the host's memory
contrib/                        what is seldom asked for, by public names alone; imported when it is
step/                           the same update in place, whole or unit by unit: in_place, units, fused, definition
"""

from importlib import import_module
from typing import Any

from yafsdp_fn.optim.base import (
    Around,
    EmptyState,
    GradientTransformation,
    apply_updates,
    as_transformation,
    assume_elementwise,
    chain,
    checked_update,
    identity,
    needed,
    new_count,
)
from yafsdp_fn.optim.in_format import InFormatState, in_format
from yafsdp_fn.optim.leafwise import LeafwiseState, assume_leafwise
from yafsdp_fn.optim.muon import layer_matrices, mean_momentum, muon, newton_schulz, orthogonalize
from yafsdp_fn.optim.on_host import on_host
from yafsdp_fn.optim.partition import PartitionState, add_decayed_weights, masked, partition
from yafsdp_fn.optim.rules import (
    ScaleByAdamState,
    ScaleByLionState,
    ScaleByRmsState,
    TraceState,
    adam,
    adamw,
    lion,
    rmsprop,
    scale_by_adam,
    scale_by_lion,
    scale_by_rms,
    sgd,
    trace,
)
from yafsdp_fn.optim.scaling import (
    Rate,
    ScaleByScheduleState,
    clip,
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
from yafsdp_fn.optim.step.analysis import parts_of, why_not_unitwise
from yafsdp_fn.optim.step.in_place import step_
from yafsdp_fn.util.foreign_names import hint

__all__ = [
    "Around",
    "EmptyState",
    "GradientTransformation",
    "InFormatState",
    "LeafwiseState",
    "PartitionState",
    "Rate",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByRmsState",
    "ScaleByScheduleState",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "as_transformation",
    "assume_elementwise",
    "assume_leafwise",
    "chain",
    "checked_update",
    "clip",
    "clip_by_global_norm",
    "constant_schedule",
    "contrib",
    "cosine_decay_schedule",
    "identity",
    "in_format",
    "join_schedules",
    "layer_matrices",
    "linear_schedule",
    "lion",
    "masked",
    "mean_momentum",
    "muon",
    "needed",
    "new_count",
    "newton_schulz",
    "on_host",
    "orthogonalize",
    "partition",
    "parts_of",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_schedule",
    "sgd",
    "step_",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_linear_decay_schedule",
    "why_not_unitwise",
]


def __getattr__(name: str) -> Any:
    contrib = import_module("yafsdp_fn.optim.contrib")
    if name == "contrib":
        return contrib
    moved = f"; it is ya.optim.contrib.{name}" if name in contrib.__all__ else hint(f"optim.{name}")
    raise AttributeError(f"module 'yafsdp_fn.optim' has no attribute {name!r}{moved}")


def __dir__() -> list[str]:
    return sorted(__all__)
