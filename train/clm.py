"""`python -m train clm`: trains a causal language model on text, a byte a token.

state, position = init() or the last checkpoint
for step in ...:
    state, metrics = train_step(state, batch_at(position))      # donates the state
    report(the metrics of the step before)                      # so that reading them waits for nothing
    now and then: held-out loss, checkpoint
    too many steps without a finite loss: back to the last checkpoint, and on with other text
    a signal on any rank: checkpoint, end
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as ya
from models import llama
from train import run, setup, together
from train.config import Config, ConfigError
from train.data import Corpus, Place, Reader
from train.evaluation import Evaluation
from train.launch import CANNOT_WORK
from train.meter import Meter
from train.report import Record, Report, Terminal, say_apart
from train.saves import Saves, load
from train.skips import Diverged, Skips
from train.spikes import Spikes
from train.stop import Stopper
from yafsdp_fn import checkpoint


def main(argv: Sequence[str]) -> int:
    rank = int(os.environ.get("RANK", 0))
    speaks = int(os.environ.get("LOCAL_RANK", rank)) == 0
    config = Config()
    try:
        config = run.parse(argv, quiet=not speaks)
        setup.model_config(config.model)
        corpus, heldout = run.text(config, int(os.environ.get("WORLD_SIZE", 1)))  # before ranks meet, which takes time
        texts = {each.name: each.fingerprint() for each in (corpus, heldout)}
    except ConfigError as error:  # of one machine's ranks alike, as a rule
        return failed(error, show=speaks, status=CANNOT_WORK)
    try:
        mesh = setup.mesh(config.sharding, config.device, config.timeout)
        together.alike(together.facts(config, texts))
        with run.claimed(config) as config:
            train(config, mesh, corpus, heldout, texts[corpus.name])
    except ConfigError as error:
        return failed(error, show=rank == 0, status=CANNOT_WORK)  # the same on every rank
    except Diverged as error:
        return failed(error, run.last_checkpoint(config), show=rank == 0, status=CANNOT_WORK)
    except checkpoint.CheckpointError as error:
        return failed(error, show=rank == 0)
    except (ya.CommunicationError, OSError) as error:
        return failed(error, run.last_checkpoint(config))  # each rank says what it was doing
    dist.destroy_process_group()
    return 0


def failed(error: Exception, advice: str = "", *, show: bool = True, status: int = 1) -> int:
    if show:
        notes = "\n".join(getattr(error, "__notes__", ()))  # of a rank that waited: where all of them were
        say_apart("\n".join(filter(None, [f"error: {error}", notes, advice])))
    return status


def train(config: Config, mesh: DeviceMesh, corpus: Corpus, heldout: Corpus, text: str) -> None:
    """A whole run. config: with its name; text: the fingerprint of `corpus`"""
    here = Place.of(mesh)
    model = setup.model_config(config.model)
    folder = config.runs / config.name
    rows, seq_len = here.ranks * config.data.batch, config.data.seq_len  # a step reads [rows, seq_len] over all ranks
    console = Terminal(quiet=here.rank != 0)
    console.print(run.headline(config, model, here, corpus, heldout), highlight=False, soft_wrap=True)

    tx = setup.optimizer(config.optim, config.steps)
    params = llama.params(model, pin_norms=config.sharding.pin_norms)
    state = ya.init(params, tx, mesh=mesh, seed=config.seed, precision=setup.precision(config.sharding))
    schedule: ya.Program | ya.schedules.Schedule = setup.schedule(config.sharding)
    position, kept = 0, []
    if config.resume:
        warn = (lambda text: say_apart(f"warning: {text}")) if here.rank == 0 else (lambda text: None)
        state, extra = load(folder / "checkpoints", state, warn)
        position, kept = extra["position"], extra.get("spikes", [])
        # the same program issues the same operations, and gives the same bits
        schedule = run.resumed(extra, state, config, text) or schedule
    loss_fn = llama.loss(model, chunks=config.sharding.chunks)
    spikes = Spikes(config.skip_spikes) if config.skip_spikes else None
    if spikes is not None:
        spikes.restore(kept)
    parts = config.sharding.microbatches
    train_step = ya.train_step(loss_fn, tx, schedule=schedule, microbatches=parts, skip=spikes)
    evaluation = Evaluation(config, model, heldout, here)
    skips = Skips(config.max_skipped, config.max_rollbacks)

    with (
        Stopper() as stop,
        Report(
            folder if here.rank == 0 else None,
            steps=config.steps,
            first=state.step,
            log_every=config.log_every,
            console=console,
        ) as report,
        Saves(folder / "checkpoints", report, config) as saves,
        Reader(corpus, position, config.data.batch, here, seed=config.seed) as reader,
    ):

        def seen(record: Record) -> None:
            report.train(record)
            skips.see(record)

        lr = setup.learning_rate(config.optim, config.steps)
        meter = Meter(seen, lr=lr, tokens=rows * seq_len, model=model, seq_len=seq_len, place=here)
        if config.eval_every and state.step == 0:
            report.evaluation(0, evaluation.loss(state))
            meter.restart()
        stopped = False
        while state.step < config.steps and not stopped:
            batch = reader.next()
            state, metrics = train_step(state, batch)
            meter.push(state.step, metrics)
            stopped, last = stop.agreed(), state.step == config.steps
            if skips.too_many:
                meter.flush()
                state = saves.back(state, skips.go_back())
                meter.restart()
                continue
            evaluates, ends = due(state.step, config.eval_every, last), last or stopped
            keeps = saves.settle(state.step) or ends or due(state.step, config.checkpoint_every, last)
            if evaluates or keeps:
                meter.flush()
                if evaluates:
                    report.evaluation(state.step, evaluation.loss(state))
                if keeps and saves.accepts(state.step, evaluation.sound(state, batch), ends):
                    saves.save(state, run.extra(config, text, reader.position, spikes), ends)
                meter.restart()
        if stopped:
            report.say(f"stopped by a signal after step {state.step}; continue with --name {config.name} --resume")


def due(step: int, every: int, last: bool) -> bool:
    """Whether something done every `every` steps, and after the last one, is done after `step`; 0: never."""
    return every > 0 and (step % every == 0 or last)
