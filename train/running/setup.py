"""Makes the objects of a run from a config: the model's config, the optimizer, the mesh, the schedule."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.axes import Axes
from models.parts.config import Shape
from train.config import SAVED, ConfigError, Mesh, Optim, Sharding, is_own, own_function, require
from train.data.tokenizer import Bytes, Tokenizer
from train.settings import Settings
from yafsdp_fn.api.train_step import TrainStep
from yafsdp_fn.pipelines.orders import SEGMENTS, V_SHAPED
from yafsdp_fn.planner.cluster import nearest
from yafsdp_fn.schedules.builders import AnySchedule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_config(name: str, vocab: int = 0, seq_len: int = 1) -> Shape:
    """The named model, with another vocabulary where `vocab` is not 0. Raises ConfigError where there is none, or where
    it has not as many positions as `seq_len`."""
    if name not in models.CONFIGS:
        raise ConfigError(f"model is {name!r}; {nearest(name, list(models.CONFIGS))}")
    model: Shape = models.CONFIGS[name]
    if model.longest is not None:
        require(seq_len <= model.longest, f"data.seq_len is {seq_len}: model {name} has {model.longest} positions")
    return dataclasses.replace(model, vocab=vocab) if vocab else model


def vocabulary(name: str, vocab: int, tokenizer: Tokenizer) -> int:
    """The model's vocabulary: `vocab`, or without one (0) the model's own for bytes, else the tokenizer's,
    rounded up to a multiple of 64. Raises ConfigError where it does not hold the tokenizer's."""
    if not vocab:
        rounded = -(-tokenizer.vocab // 64) * 64
        vocab = model_config(name).vocab if isinstance(tokenizer, Bytes) else rounded
    require(
        vocab >= tokenizer.vocab,
        f"model {name} has a vocabulary of {vocab}: the tokenizer needs {tokenizer.vocab}; --vocab 0 makes room",
    )
    return vocab


def learning_rate(config: Optim, steps: int) -> ya.optim.Rate:
    """Learning rate by the number of completed steps. The first step already moves: warmup does not begin at zero."""
    peak = config.learning_rate
    end = config.learning_rate * config.final_fraction
    first = peak / (config.warmup + 1)
    if config.decay == "wsd":
        decays = config.decays(steps)
        return ya.optim.join_schedules(
            [
                ya.optim.warmup_constant_schedule(first, peak, config.warmup),
                ya.optim.linear_schedule(peak, end, decays),
            ],
            [steps - decays],
        )
    return ya.optim.warmup_cosine_decay_schedule(
        init_value=first, peak_value=peak, warmup_steps=config.warmup, decay_steps=steps, end_value=end
    )


def optimizer(config: Optim, steps: int) -> ya.optim.GradientTransformation:
    adamw = ya.optim.adamw(
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=lambda path, param: len(param.shape) > 1,
    )
    if config.moments == "int8":
        adamw = ya.optim.in_format(adamw, ya.formats.Roots())
    if config.moments == "host":
        adamw = ya.optim.on_host(adamw)
    return ya.optim.chain(ya.optim.clip_by_global_norm(config.clip_norm), adamw)


def travelling(params: Any, wire: str) -> Any:
    """The parameters of a model, as --sharding.wire lets them travel: the matrices of layers, but no router."""
    if wire == "none":
        return params
    if wire == "float8":
        return ya.formats.float8(params)
    format = ya.formats.Scaled(stochastic=wire == "int8-stochastic")
    return ya.params.with_wire(
        params,
        ya.Wire(format, None if wire == "int8" else format),
        lambda path, leaf: len(leaf.shape) > 2 and "router" not in path,
    )


EVERY_LAYER = sys.maxsize
NO_STAGES = Mesh()


def precision(config: Sharding) -> ya.Precision:
    return ya.Precision(
        compute=DTYPES[config.compute],
        reduce=DTYPES[config.reduce],
        accumulate=torch.float32 if config.accumulate else None,
    )


def own_device(device: str) -> str | None:
    """The device that `ya.mesh` is to take for `--device`. Raises ConfigError, on every rank of this machine, unless
    each has a GPU of its own where they compute on GPUs."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    found = torch.cuda.device_count()
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; --device cpu, or auto")
    if device != "cpu" and torch.cuda.is_available() and ranks > found:
        raise ConfigError(
            f"{ranks} ranks on a machine where torch sees {found} GPU{'s' * (found > 1)}, and each needs its own: "
            f"start {found} (launch --ranks {found}, or auto; torchrun --nproc-per-node {found}), or add --device cpu"
        )
    return None if device == "auto" else device


def mesh(config: Sharding, stages: Mesh, device: str, seconds: float) -> DeviceMesh:
    """The mesh that stages and the schedule need, over all ranks; a collective without an answer raises after
    `seconds`.

    Raises CommunicationError where the ranks do not meet.
    """
    device_of = own_device(device)
    shape: dict[str, Any] = {
        "replicate": config.replicate,
        "local": config.local // (stages.tensor * stages.context) or None,
    }
    if config.schedule == "ddp":
        shape = {"replicate": -1, "shard": 1}
    shape |= {"stage": stages.stage, **stages.inside}
    try:
        return ya.mesh(**shape, device=device_of, timeout=timedelta(seconds=seconds))
    except ValueError as error:
        raise ConfigError(
            f"--mesh.stage {stages.stage}, {''.join(f'--mesh.{name} {n}, ' for name, n in stages.inside.items())}"
            f"--sharding.replicate {config.replicate}, --sharding.local {config.local}: {error}"
        ) from error
    except RuntimeError as error:  # torch.distributed's
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ya.errors.CommunicationError(
            f"rank {os.environ.get('RANK', 0)}: the ranks did not meet at {where}: {error}"
        ) from error


def axes(stages: Mesh, model: Shape, seq_len: int) -> Axes:
    """The axes that this model is computed over; its checkpoints fit parameters that were made for the same `tensor`
    and `expert`. Raises ConfigError where it cannot be."""
    found = Axes(**dict.fromkeys(stages.inside, True), sequence=stages.sequence)
    parts = 2 * stages.context
    require(
        not found.context or seq_len % parts == 0,
        f"mesh.context is {stages.context}, data.seq_len {seq_len}: not a multiple of {parts}",
    )
    try:
        models.of(model).params(model, **found.options)
        found.check(model, seq_len // stages.context, stages.inside)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"{stages.said}: {error}") from error
    return found


def schedule(config: Sharding, stages: Mesh = NO_STAGES) -> AnySchedule:
    """The schedule of a step; where there are several stages, with their order."""
    inside = _of_a_stage(config)
    if stages.stage == 1:
        return inside
    order: Callable[..., AnySchedule] = getattr(ya.schedules, stages.order)
    return order(inside)


def assignment(config: Settings, model: Shape, params: Any) -> ya.schedules.Assignment | None:
    """Assigns the model's units to stages: as even as can be. None without stages."""
    stages = config.stages
    rows = config.data.usual // config.sharding.microbatches
    if stages.stage == 1:
        return None
    tokens = torch.zeros(rows, config.data.seq_len, dtype=torch.int64)
    trace = ya.planner.trace(models.of(model).loss(model), params, {"tokens": tokens, "targets": tokens})
    try:
        shape: Any = "v" if stages.order in V_SHAPED else "loop"
        return ya.schedules.assign(trace, stages.stage, per_stage=SEGMENTS.get(stages.order, 1), shape=shape)
    except ValueError as error:
        raise ConfigError(f"--mesh.stage {stages.stage}, --mesh.order {stages.order}: {error}") from error


def check_stages(config: Settings, train_step: TrainStep, state: ya.ShardedState, batch: Any) -> None:
    """Refuses a step that cannot be cut into the stages of `state`, or not be scheduled as the settings have it."""
    try:
        train_step.lower(state, batch)
    except ConfigError:
        raise
    except ValueError as error:  # Refused, too
        raise ConfigError(
            f"--mesh.stage {config.stages.stage}, --mesh.order {config.stages.order}, --sharding.schedule "
            f"{config.sharding.schedule}: {error}"
        ) from error


def _of_a_stage(config: Sharding) -> ya.schedules.Schedule:
    if is_own(config.schedule):
        return _own(config.schedule)
    if config.schedule == SAVED:
        return _missing
    if config.schedule == "hpz":
        return ya.schedules.hpz(EVERY_LAYER, remat=config.remat, update=config.update)
    factory: Callable[..., ya.schedules.Schedule] = getattr(ya.schedules, config.schedule)
    return factory(remat=config.remat, update=config.update)


def _own(where: str) -> ya.schedules.Schedule:
    """The function of a file, which is run."""
    found: ya.schedules.Schedule = own_function(where, "sharding.schedule", "one from a trace to a program")

    def schedule(trace: ya.schedules.Trace) -> ya.Program:
        try:
            return ya.verify(found(trace))
        except Exception as error:  # of somebody's code, or refused
            raise ConfigError(f"sharding.schedule {where}: {type(error).__name__}: {error}") from error

    return schedule


def _missing(trace: ya.schedules.Trace) -> ya.Program:
    raise ConfigError(
        f"sharding.schedule: the program in the checkpoint is not for this step ({trace.mesh}, microbatches: "
        f"{trace.microbatches}); name a schedule, FILE.py:NAME or one of the library's"
    )
