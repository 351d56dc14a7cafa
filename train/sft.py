"""`python -m train sft`: fine-tunes a model on conversations, and counts what the assistant says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from train.config import require
from train.data.sources import open_conversations
from train.running import loop, run, setup
from train.running.loop import Job
from train.settings import Config, Tuning
from train.trained.loaded import Opened, opened


def main(argv: Sequence[str]) -> int:
    return loop.main(argv, Tuning, job)


def job(config: Tuning, ranks: int) -> tuple[Tuning, Job]:
    """The settings, complete, and what they ask for."""
    start = Path(config.start) if config.start else run.newest(config.runs, Config)
    config = dataclasses.replace(config, start=str(start.expanduser().resolve()))
    base = opened(Path(config.start), config.tokenizer)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, learning_rate=peak(config, base)))
    seq_len = config.data.seq_len
    longest = base.model.longest
    require(longest is None or seq_len <= longest, f"data.seq_len is {seq_len}: the model has {longest} positions")
    training, heldout = open_conversations(config.data, base.tokenizer, config.runs / run.CACHE)
    config = run.settled(config, training, heldout, ranks)

    def begin(tx: ya.optim.GradientTransformation, mesh: DeviceMesh) -> ya.ShardedState:
        precision = setup.precision(config.sharding)
        return base.begin(tx, mesh, precision, config.lora, config.sharding, config.seed)

    return config, Job(
        model=base.model,
        name=f"sft of {base.name}",
        begin=begin,
        training=training,
        heldout=heldout,
        tokenizer=base.tokenizer,
        text=training.fingerprint(),
    )


def peak(config: Tuning, base: Opened) -> float:
    """The learning rate that was given, or what is usual for what is fine-tuned."""
    if config.optim.learning_rate:
        return config.optim.learning_rate
    if base.run is not None:
        return base.run.optim.learning_rate
    return 2e-4 if config.lora.rank else 2e-5
