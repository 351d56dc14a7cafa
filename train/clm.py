"""`python -m train clm`: trains a causal language model on text, a byte a token.

state, position = init() or the last checkpoint
for step in ...:
    state, metrics = train_step(state, batch_at(position))      # donates the state
    report(the metrics of the step before)                      # so that reading them waits for nothing
    now and then: held-out loss, checkpoint
    a signal on any rank: checkpoint, end
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models import llama
from train import run, setup
from train.config import Config, ConfigError, to_json
from train.data import Corpus, Place, Reader, batch_at
from train.meter import Diverged, Meter
from train.report import Report
from train.stop import Stopper
from yafsdp_fn import checkpoint


def main(argv: Sequence[str]) -> int:
    rank = int(os.environ.get("RANK", 0))
    config = Config()
    try:
        config = run.parse(argv, quiet=rank != 0)
        corpus, heldout = run.text(config, int(os.environ.get("WORLD_SIZE", 1)))  # before ranks meet, which takes time
        mesh = setup.mesh(config.sharding, config.device, config.timeout)
        run.must_be_the_same(corpus, heldout, mesh.size())
        train(run.named(config), mesh, corpus, heldout)
    except (ConfigError, checkpoint.CheckpointError) as error:
        return failed(error, show=rank == 0)  # the same on every rank
    except Diverged as error:
        return failed(error, run.last_checkpoint(config), show=rank == 0)
    except ya.CommunicationError as error:
        return failed(error, run.last_checkpoint(config))  # each rank says what it was doing
    dist.destroy_process_group()
    return 0


def failed(error: Exception, advice: str = "", *, show: bool = True) -> int:
    if show:
        print(f"error: {error}\n{advice}".strip(), file=sys.stderr, flush=True)
    return 1


def train(config: Config, mesh: DeviceMesh, corpus: Corpus, heldout: Corpus) -> None:
    here = Place.of(mesh)
    console = Console(quiet=here.rank != 0)
    model = setup.model_config(config.model)
    folder = run.check_folder(config)
    rows, seq_len = here.ranks * config.data.batch, config.data.seq_len  # a step reads [rows, seq_len] over all ranks

    tx = setup.optimizer(config.optim, config.steps)
    params = llama.params(model, pin_norms=config.sharding.pin_norms)
    state = ya.init(params, tx, mesh=mesh, seed=config.seed, precision=setup.precision(config.sharding))
    schedule: ya.Program | ya.schedules.Schedule = setup.schedule(config.sharding)
    position = 0
    if config.resume:
        state, extra = checkpoint.load(folder / "checkpoints", state)
        position = extra["position"]
        # the same program issues the same operations, and gives the same bits
        schedule = run.resumed(extra, state, config, corpus) or schedule
    loss_fn = llama.loss(model, chunks=config.sharding.chunks)
    train_step = ya.train_step(loss_fn, tx, schedule=schedule, microbatches=config.sharding.microbatches)
    eval_step = ya.eval_step(llama.loss(model))

    def evaluate() -> float:
        count = min(config.eval_batches, heldout.windows // rows)
        parts = (batch_at(heldout, i * rows, config.data.batch, here, seed=0) for i in range(count))
        return float(torch.stack([eval_step(state, part)["loss"] for part in parts]).mean())

    def save() -> Path:
        extra = run.extra(config, corpus, reader.position)
        return checkpoint.save(folder / "checkpoints", state, extra, keep=config.keep)

    console.print(run.headline(config, model, here, corpus, heldout), highlight=False, soft_wrap=True)
    if here.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(to_json(config))
    report_folder = folder if here.rank == 0 else None
    with (
        Report(
            report_folder, steps=config.steps, first=state.step, log_every=config.log_every, console=console
        ) as report,
        Reader(corpus, position, config.data.batch, here, seed=config.seed) as reader,
        Stopper() as stop,
    ):
        lr = setup.learning_rate(config.optim, config.steps)
        meter = Meter(report.train, lr=lr, tokens=rows * seq_len, model=model, seq_len=seq_len, place=here)
        if config.eval_every and state.step == 0:
            report.evaluation(0, evaluate())
            meter.restart()
        stopped = False
        while state.step < config.steps and not stopped:
            state, metrics = train_step(state, reader.next())
            meter.push(state.step, metrics)
            stopped = stop.agreed()
            last = state.step == config.steps
            evaluates = due(state.step, config.eval_every, last) and not stopped
            saves = due(state.step, config.checkpoint_every, last) or last or stopped
            if evaluates or saves:
                meter.flush()  # refuses a step that was not finite before anything is made of its state
                if evaluates:
                    report.evaluation(state.step, evaluate())
                if saves:
                    report.checkpoint(state.step, save())
                meter.restart()
        if stopped:
            report.say(f"stopped by a signal after step {state.step}; continue with --name {config.name} --resume")


def due(step: int, every: int, last: bool) -> bool:
    """Whether something done every `every` steps, and after the last one, is done after `step`; 0: never."""
    return every > 0 and (step % every == 0 or last)
