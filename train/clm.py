"""`python -m train clm`: trains a causal language model on text, from its beginning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from train.config import require
from train.data.sources import open_text
from train.running import loop, run, setup
from train.running.loop import Job
from train.settings import Config


def main(argv: Sequence[str]) -> int:
    return loop.main(argv, Config, job)


def job(config: Config, ranks: int) -> tuple[Config, Job]:
    """The settings, complete, and what they ask for."""
    setup.model_config(config.model)
    tokenizer = run.tokenizer(config)
    config = dataclasses.replace(config, vocab=setup.vocabulary(config.model, config.vocab, tokenizer))
    model = setup.model_config(config.model, config.vocab, config.data.seq_len)
    axes = setup.axes(config.mesh, model, config.data.seq_len)
    limited = {"capacity": config.capacity} if config.capacity else {}
    require(not limited or hasattr(model, "experts"), f"capacity is {config.capacity}: {config.model} has no experts")
    evaluated = 0  # held-out rows: of a stream no others are kept
    if config.eval_every:
        evaluated = config.eval_batches * ranks * config.data.usual
    training, heldout = open_text(config.data, tokenizer, config.runs / run.CACHE, evaluated)
    config = run.settled(config, training, heldout, ranks)

    def begin(tx: ya.optim.GradientTransformation, mesh: DeviceMesh) -> ya.ShardedState:
        params = models.of(model).params(model, pin_norms=config.sharding.pin_norms, **axes.options)
        params = setup.travelling(params, config.sharding.wire)
        precision = setup.precision(config.sharding)
        stages = setup.assignment(config, model, params)
        return ya.init(params, tx, mesh=mesh, seed=config.seed, precision=precision, stages=stages)

    return config, Job(
        model=model,
        name=config.model,
        begin=begin,
        training=training,
        heldout=heldout,
        tokenizer=tokenizer,
        text=training.fingerprint(),
        loss=limited,
    )
