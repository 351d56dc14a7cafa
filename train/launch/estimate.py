"""What a step of `python -m train clm ...` will take on a cluster, from its settings alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import models
import yafsdp_fn as ya
from train.config import Config, ConfigError, require
from train.running import run, setup
from train.running.report import duration


def estimate(command: Sequence[str], cluster: str, ranks: int) -> list[str]:
    """Lines of text. command: of `python -m train`. Raises ConfigError for another one than clm, settings that cannot
    work, an unknown cluster."""
    require(command[0] == "clm", f"--cluster: a step of clm can be estimated, not of {command[0]}")
    config = run.parse(command[1:], Config, quiet=False)
    vocabulary = setup.vocabulary(config.model, config.vocab, run.tokenizer(config))
    model, sharding = setup.model_config(config.model, vocabulary), config.sharding
    stages = config.stages.stage
    tokens = torch.empty(config.data.batch, config.data.seq_len, dtype=torch.long, device="meta")
    try:
        params = models.of(model).params(model, pin_norms=sharding.pin_norms)
        plan = ya.plan(
            models.of(model).loss(model, chunks=sharding.chunks),
            params,
            {"tokens": tokens, "targets": tokens},
            tx=setup.optimizer(config.optim, config.steps),
            ranks=ranks,
            cluster=cluster,
            precision=setup.precision(sharding),
            schedule=setup.schedule(sharding, config.stages),
            stages=setup.assignment(config, model, params) or 1,
            microbatches=sharding.microbatches,
            replicate=ranks // stages
            if sharding.schedule == "ddp"
            else sharding.replicate
            if sharding.replicate > 1
            else None,
            local=sharding.local or None,
        )
    except ValueError as error:
        raise ConfigError(f"--cluster {cluster}, {ranks} ranks: {error}") from None
    rate = tokens.numel() * (ranks // stages) / plan.step_s
    fits = "fits into" if plan.fits else "does NOT fit into"
    return [
        f"Estimate for {config.model}, {model.num_parameters / 1e6:.1f}M parameters, on {ranks} ranks of {cluster}:",
        f"  a step {plan.step_s * 1e3:.4g} ms, {rate:,.0f} tokens/s, bound by {plan.bound_in_words}",
        f"  {config.steps:,} steps: {duration(plan.step_s * config.steps)}, without evaluations and checkpoints",
        f"  memory {plan.memory.peak_bytes / 2**30:.2f} GiB a rank, {fits} {plan.budget / 2**30:.0f} GiB",
    ]
