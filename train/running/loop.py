"""The loop of every run.

state, position = begin() or the last checkpoint
for step in ...:
    state, metrics = train_step(state, reader.next())           # donates the state
    report(the metrics of the step before)                      # so that reading them waits for nothing
    now and then: held-out loss, checkpoint
    too many steps without a finite loss: back to the last checkpoint, and on with other text
    a signal on any rank: checkpoint, end
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train.config import Settings
from train.data.reader import Reader
from train.data.rows import Place, Rows, batches
from train.data.tokenizer import Bytes, Tokenizer
from train.running import run, setup
from train.running.about import this_start
from train.running.evaluation import Evaluation
from train.running.meter import Meter
from train.running.recorded import Recorded
from train.running.report import Record, Report, Terminal, say_apart
from train.running.saves import Saves, load
from train.running.skips import Skips
from train.running.spikes import Spikes
from train.running.stop import Stopper
from yafsdp_fn.schedules.stages.builders import AnySchedule


class Job(NamedTuple):
    """What a run trains, and on what."""

    model: Shape
    name: str
    """Of the model, for people."""
    begin: Callable[[ya.optim.GradientTransformation, DeviceMesh], ya.ShardedState]
    """The state of step 0, with this optimizer."""
    training: Rows
    heldout: Rows
    tokenizer: Tokenizer
    text: str
    """The fingerprint of `training`."""


def train(config: Settings, mesh: DeviceMesh, job: Job) -> None:
    """A whole run. config: with its name"""
    here = Place.of(mesh)
    folder = config.runs / config.name
    rows, seq_len = here.ranks * config.data.batch, config.data.seq_len  # a step reads [rows, seq_len] over all ranks
    console = Terminal(quiet=not here.leads)
    console.print(
        run.headline(config, job.name, job.model, here, job.training, job.heldout), highlight=False, soft_wrap=True
    )

    tx = setup.optimizer(config.optim, config.steps)
    state = job.begin(tx, mesh)
    schedule: AnySchedule = setup.schedule(config.sharding, config.stages)
    position, kept = 0, []
    if config.resume:
        warn = (lambda text: say_apart(f"warning: {text}")) if here.leads else (lambda text: None)
        state, extra = load(folder / "checkpoints", state, warn)
        position, kept = extra["position"], extra.get("spikes", [])
        # the same program issues the same operations, and gives the same bits
        schedule = run.resumed(extra, state, config, job.text) or schedule
    loss_of = models.of(job.model).loss
    loss_fn = loss_of(job.model, chunks=config.sharding.chunks)
    spikes = Spikes(config.skip_spikes) if config.skip_spikes else None
    if spikes is not None:
        spikes.restore(kept)
    parts = config.sharding.microbatches
    train_step = ya.train_step(loss_fn, tx, schedule=schedule, microbatches=parts, skip=spikes)
    evaluation = Evaluation(config, loss_of(job.model, has_aux=True, bare=True), job.heldout, here)
    if here.stages > 1:  # what cannot be cut, or scheduled, is refused before there is a run
        batch, _ = next(batches(job.training, position, config.data.batch, here, seed=config.seed))
        setup.check_stages(config, train_step, state, batch)
    run.keep(config)
    skips = Skips(config.max_skipped, config.max_rollbacks)

    with (
        Stopper() as stop,
        Report(
            folder if here.leads else None,
            steps=config.steps,
            first=state.step,
            log_every=config.log_every,
            console=console,
            unit="byte" if isinstance(job.tokenizer, Bytes) else "token",
        ) as report,
        Saves(folder / "checkpoints", report, config) as saves,
        Reader(job.training, position, config.data.batch, here, seed=config.seed) as reader,
        Recorded(
            train_step,
            folder / "timeline.json" if here.leads else None,
            every=config.timeline_every if here.stages == 1 else 0,
            steps=config.steps,
            warn=report.warn,
        ) as recorded_step,
    ):
        about = {"model": job.name, "parameters": job.model.num_parameters, "tokens": rows * seq_len}
        report.events.add("start", step=state.step, **about, **this_start(here))

        def seen(record: Record) -> None:
            report.train(record)
            skips.see(record)

        lr = setup.learning_rate(config.optim, config.steps)
        meter = Meter(seen, lr=lr, tokens=rows * seq_len, model=job.model, seq_len=seq_len, place=here)
        if config.eval_every and state.step == 0:
            report.evaluation(0, *evaluation.loss(state))
            meter.restart()
        stopped = False
        while state.step < config.steps and not stopped:
            batch = reader.next()
            state, metrics = recorded_step(state, batch)
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
                    report.evaluation(state.step, *evaluation.loss(state))
                if keeps and saves.accepts(state.step, evaluation.sound(state, batch), ends):
                    saves.save(state, run.extra(config, job.text, reader.position, spikes), ends)
                meter.restart()
        if config.calibrate and not stopped:
            report.events.add("machine", **vars(ya.calibrate("this machine", device=here.device.type)))
        if stopped:
            report.say(f"stopped by a signal after step {state.step}; continue with --name {config.name} --resume")


def due(step: int, every: int, last: bool) -> bool:
    """Whether something done every `every` steps, and after the last one, is done after `step`; 0: never."""
    return every > 0 and (step % every == 0 or last)
