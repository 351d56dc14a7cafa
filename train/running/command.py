"""What `clm` and `sft` do around the loop: settings, what is read, ranks that meet, a folder, and sentences for errors.

config, job = prepare(the command line)        # before ranks meet, which takes time
mesh; ranks that were started alike            # else refused
with the folder of the run: loop.train
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

import yafsdp_fn as ya
from train.config import ConfigError, Settings, require
from train.running import run, setup, together
from train.running.elastic import CANNOT_WORK
from train.running.loop import Job, train
from train.running.report import say_apart
from train.running.skips import Diverged
from yafsdp_fn import checkpoint

S = TypeVar("S", bound=Settings)


def prepare(
    argv: Sequence[str], kind: type[S], job: Callable[[S, int], tuple[S, Job]], *, quiet: bool
) -> tuple[Settings, Job, dict[str, str]]:
    """What each rank does alone: settings, complete but for the run's name, what they ask for, and fingerprints of what
    all ranks must read alike. job: `(settings, ranks of a stage) -> (settings, job)`"""
    config, ranks = run.parse(argv, kind, quiet=quiet), int(os.environ.get("WORLD_SIZE", 1))
    stages = config.stages.stage
    require(ranks % stages == 0, f"mesh.stage is {stages}: {ranks} rank(s) do not divide into so many stages")
    config, made = job(config, ranks // stages)
    texts = {made.training.name: made.text, made.heldout.name: made.heldout.fingerprint()}
    return config, made, texts | {"tokenizer": made.tokenizer.fingerprint()}


def main(argv: Sequence[str], kind: type[S], job: Callable[[S, int], tuple[S, Job]]) -> int:
    rank = int(os.environ.get("RANK", 0))
    speaks = int(os.environ.get("LOCAL_RANK", rank)) == 0
    try:
        config, made, texts = prepare(argv, kind, job, quiet=not speaks)
    except ConfigError as error:  # of one machine's ranks alike, as a rule
        return failed(error, show=speaks, status=CANNOT_WORK)
    try:
        mesh = setup.mesh(config.sharding, config.stages, config.device, config.timeout)
        together.alike(together.facts(config, texts))
        with run.claimed(config, made.tokenizer) as config:
            train(config, mesh, made)
    except ConfigError as error:
        return failed(error, show=rank == 0, status=CANNOT_WORK)  # the same on every rank
    except Diverged as error:
        return failed(error, run.last_checkpoint(config), show=rank == 0, status=CANNOT_WORK)
    except checkpoint.CheckpointError as error:
        return failed(error, show=rank == 0)
    except (ya.CommunicationError, OSError) as error:
        return failed(error, run.last_checkpoint(config))  # each rank says what it was doing
    del mesh  # with its thread, which looks into the store that rank 0 keeps
    dist.barrier()
    dist.destroy_process_group()
    return 0


def failed(error: Exception, advice: str = "", *, show: bool = True, status: int = 1) -> int:
    if show:
        notes = "\n".join(getattr(error, "__notes__", ()))  # of a rank that waited: where all of them were
        say_apart("\n".join(filter(None, [f"error: {error}", notes, advice])))
    return status
