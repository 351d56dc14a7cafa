"""From a config to the objects of a run: the model's config, the optimizer, the schedule."""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from models import llama
from train.config import ConfigError, Optim, Sharding, require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_config(name: str) -> llama.Config:
    """A byte-level model: its vocabulary must hold 256 tokens."""
    if name not in llama.CONFIGS:
        raise ConfigError(f"model is {name!r}; there are {', '.join(llama.CONFIGS)}")
    model = llama.CONFIGS[name]
    require(model.vocab >= 256, f"model {name} has a vocabulary of {model.vocab}: bytes need 256")
    return model


def learning_rate(config: Optim, steps: int) -> ya.optim.Schedule:
    """Learning rate by the number of completed steps. The first step already moves: warmup does not begin at zero."""
    if config.warmup >= steps:
        raise ConfigError(f"optim.warmup {config.warmup} is not shorter than the run, steps {steps}")
    peak = config.learning_rate
    return ya.optim.warmup_cosine_decay_schedule(
        init_value=peak / (config.warmup + 1),
        peak_value=peak,
        warmup_steps=config.warmup,
        decay_steps=steps,
        end_value=peak * config.final_fraction,
    )


def optimizer(config: Optim, steps: int) -> ya.optim.GradientTransformation:
    return ya.optim.chain(
        ya.optim.clip_by_global_norm(config.clip_norm),
        ya.optim.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda path, param: len(param.shape) > 1,
        ),
    )


def precision(config: Sharding) -> ya.Precision:
    return ya.Precision(compute=DTYPES[config.compute], reduce=DTYPES[config.reduce])


def schedule(config: Sharding) -> ya.schedules.Schedule:
    kind, _, count = config.remat.partition(":")
    match kind:
        case "first":
            remat = ya.remat.first(int(count))
        case "every":
            remat = ya.remat.every(int(count))
        case "all":
            remat = ya.remat.all
        case _:
            remat = ya.remat.none
    factory = {"zero3": ya.schedules.zero3, "zero2": ya.schedules.zero2}[config.schedule]
    return factory(remat=remat)
