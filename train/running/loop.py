"""Runs `clm` and `sft`: settings, text, ranks that meet, a folder; and the loop of every run.

config, job = prepare(the command line)                         # before ranks meet, which takes time
mesh; ranks that were started alike                             # else refused; errors become sentences
with the folder of the run: train(config, mesh, job)

state, position = begin() or the last checkpoint
for step in ...:
    state, metrics = train_step(state, reader.next())           # donates the state
    report(the metrics of the step before)                      # so that reading them waits for nothing
    now and then: held-out loss, checkpoint
    too many steps without a finite loss: back to the last checkpoint, and on with other text
    a signal on any rank: checkpoint, end
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train.command_line import say_apart
from train.config import ConfigError, own_function, require
from train.data.rows import Batch, Place, Reader, Rows, at_most, batches
from train.data.tokenizer import Bytes, Tokenizer
from train.running import run, setup, together
from train.running.elastic import CANNOT_WORK
from train.running.meter import Meter, Recorded
from train.running.report import Log, Record, Report, Terminal
from train.running.run import this_start
from train.running.saves import Diverged, Saves, Skips, Spikes, load
from train.running.together import Stopper
from train.settings import Settings
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint.content import MANIFEST
from yafsdp_fn.checkpoint.folder import folder_name
from yafsdp_fn.schedules.builders import AnySchedule

S = TypeVar("S", bound=Settings)


def prepare(
    argv: Sequence[str], kind: type[S], job: Callable[[S, int], tuple[S, Job]], *, quiet: bool
) -> tuple[Settings, Job, dict[str, str]]:
    """Prepares, on each rank alone: settings, complete but for the run's name, what they ask for, and fingerprints of
    what all ranks must read alike. job: `(settings, ranks that rows go to) -> (settings, job)`"""
    config = run.parse(argv, kind, quiet=quiet)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    mesh = config.stages
    require(ranks % mesh.stage == 0, f"mesh.stage is {mesh.stage}: {ranks} rank(s) do not divide into so many stages")
    require(
        ranks % (mesh.alike * mesh.expert) == 0,
        f"{mesh.said}: {ranks} rank(s) do not divide into so many",
    )
    config, made = job(config, ranks // mesh.alike)
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
        del mesh  # with its thread, which looks into the store that rank 0 keeps
        with together.talking("the end of the run"):
            dist.barrier()
            dist.destroy_process_group()
    except ConfigError as error:
        return failed(error, show=rank == 0, status=CANNOT_WORK)  # the same on every rank
    except Diverged as error:
        return failed(error, run.last_checkpoint(config), show=rank == 0, status=CANNOT_WORK)
    except checkpoint.CheckpointError as error:
        return failed(error, show=rank == 0)
    except (ya.errors.CommunicationError, OSError) as error:
        return failed(error, run.last_checkpoint(config))  # each rank says what it was doing
    return 0


def failed(error: Exception, advice: str = "", *, show: bool = True, status: int = 1) -> int:
    if show:
        notes = "\n".join(getattr(error, "__notes__", ()))  # of a rank that waited: where all of them were
        say_apart("\n".join(filter(None, [f"error: {error}", notes, advice])))
    return status


class Job(NamedTuple):
    """A run's model, its beginning, and its text."""

    model: Shape
    name: str
    """The model's name, for people."""
    begin: Callable[[ya.optim.GradientTransformation, DeviceMesh], ya.ShardedState]
    """The state of step 0, with this optimizer."""
    training: Rows
    heldout: Rows
    tokenizer: Tokenizer
    text: str
    """The fingerprint of `training`."""
    loss: Mapping[str, Any] = {}
    """Further options of the loss that it trains."""


def train(config: Settings, mesh: DeviceMesh, job: Job) -> None:
    """A whole run. config: with its name"""
    here = Place.of(mesh)
    folder = config.folder
    rows, seq_len = here.ranks * config.data.batch, config.data.seq_len  # a step reads [rows, seq_len] over all ranks
    console = Terminal(quiet=not here.leads)
    console.print(
        run.headline(config, job.name, job.model, here, job.training, job.heldout), highlight=False, soft_wrap=True
    )

    unit = "byte" if isinstance(job.tokenizer, Bytes) else "token"
    tx = setup.optimizer(config.optim, config.steps)
    state = job.begin(tx, mesh)
    schedule: AnySchedule = setup.schedule(config.sharding, config.stages)
    position = 0
    kept = []
    texts = {"text": job.text} | ({"heldout": job.heldout.fingerprint()} if config.eval_every else {})
    if config.resume:
        warn = (lambda text: say_apart(f"warning: {text}")) if here.leads else (lambda text: None)
        state, extra = load(folder / "checkpoints", state, warn)
        where = folder / "checkpoints" / folder_name(state.step) / MANIFEST
        run.checked(extra, job.training, config.seed, str(where))
        position = extra["position"]
        kept = extra.get("spikes", [])
        if here.leads:
            run.compared(folder, config, state.step, warn)
        # the same program issues the same operations, and gives the same bits
        schedule = run.resumed(extra, state, config, texts, warn) or schedule
    loss_of = partial(models.of(job.model).loss, axes=setup.axes(config.stages, job.model, seq_len))
    loss_fn = loss_of(job.model, chunks=config.sharding.chunks, **job.loss)
    spikes = Spikes(config.skip_spikes) if config.skip_spikes else None
    if spikes is not None:
        spikes.restore(kept)
    parts = config.sharding.microbatches
    train_step = ya.train_step(loss_fn, tx, schedule=schedule, microbatches=parts, skip=spikes)
    evaluation = Evaluation(config, loss_of(job.model, has_aux=True, bare=True), job.heldout, here)
    if here.stages > 1:  # what cannot be cut, or scheduled, is refused before there is a run
        batch, _ = next(batches(job.training, position, config.data.batch, here, seed=config.seed))
        setup.check_stages(config, train_step, state, batch)
    logs = own_logs(config.log)
    run.keep(config)
    skips = Skips(config.max_skipped, config.max_rollbacks)
    # before there is a reader's thread: processes that a pipeline forks in it would inherit the pipes of commands that
    # run here, and who reads from one would wait for them
    about_start = this_start(here)

    with (
        garbage_stays() if config.gc_every else nullcontext(),
        Stopper() as stop,
        Report(
            folder if here.leads else None,
            steps=config.steps,
            first=state.step,
            log_every=config.log_every,
            console=console,
            unit=unit,
            logs=logs,
        ) as report,
        checkpoint.Saver(folder / "checkpoints", keep_last=config.keep, keep_every=config.keep_every or None) as saver,
        Reader(job.training, position, config.data.batch, here, seed=config.seed) as reader,
    ):
        recorded_step = Recorded(
            train_step,
            folder / "timeline.json" if here.leads else None,
            every=config.timeline_every if here.stages == 1 else 0,
            steps=config.steps,
            warn=report.warn,
        )
        saves = Saves(saver, folder / "checkpoints", report, config)
        report.events.add(
            "start",
            step=state.step,
            model=job.name,
            parameters=job.model.num_parameters,
            tokens=rows * seq_len,
            unit=unit,
            tokenizer=job.tokenizer.fingerprint(),
            text=job.training.describe(),
            heldout=job.heldout.describe(),
            **about_start,
        )

        def seen(record: Record) -> None:
            report.train(record)
            skips.see(record)

        lr = setup.learning_rate(config.optim, config.steps)
        skipped = not_counted(state)
        meter = Meter(seen, lr=lr, tokens=rows * seq_len, model=job.model, seq_len=seq_len, place=here, skipped=skipped)
        if config.eval_every and state.step == 0:
            report.evaluation(0, *evaluation.loss(state))
            meter.restart()
        stopped = False
        while state.step < config.steps and not stopped:
            batch = reader.next()
            state, metrics = recorded_step(state, batch)
            meter.push(state.step, metrics)
            if due(state.step, config.gc_every, last=False):
                gc.collect()
            stopped = stop.agreed()
            last = state.step == config.steps
            if skips.too_many:
                meter.flush()
                state = saves.back(state, skips.go_back())
                meter.skipped = not_counted(state)
                meter.restart()
                continue
            evaluates = due(state.step, config.eval_every, last)
            ends = last or stopped
            keeps = saves.settle(state.step) or ends or due(state.step, config.checkpoint_every, last)
            if evaluates or keeps:
                meter.flush()
                if evaluates:
                    report.evaluation(state.step, *evaluation.loss(state))
                if keeps and saves.accepts(state.step, evaluation.sound(state, batch), ends):
                    saves.save(state, run.extra(config, texts, reader.position, spikes), ends)
                meter.restart()
        recorded_step.write()
        if config.calibrate and not stopped:
            report.events.add("machine", **vars(ya.planner.calibrate("this machine", device=here.device.type)))
        if stopped:
            report.say(f"stopped by a signal after step {state.step}; continue with --name {config.name} --resume")


def own_logs(where: str) -> list[Log]:
    """The function that --log names, on rank 0 alone: its file may begin a run of wandb."""
    logs: list[Log] = []

    def read() -> None:
        try:
            logs.append(own_function(where, "log", "one that is given a dict"))
        except Exception as error:
            raise ConfigError(f"log: {where}: {type(error).__name__}: {error}") from error

    if where:
        together.on_rank_0(read, "reading the file of --log")
    return logs


@contextmanager
def garbage_stays() -> Iterator[None]:
    """Python collects no cyclic garbage of its own accord inside. What is there at the beginning is taken to stay, so
    that a collection only walks what steps have left."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def not_counted(state: ya.ShardedState) -> int:
    """Returns how many steps of a state were skipped: Adam has not counted them."""
    counts = [leaf for leaf in optree.tree_leaves(state.opt_state) if leaf.ndim == 0]
    return state.step - int(counts[0])


def due(step: int, every: int, last: bool) -> bool:
    """Tells whether something done every `every` steps, and after the last one, is done after `step`; 0: never."""
    return every > 0 and (step % every == 0 or last)


LossAndMore = Callable[[Any, Batch], tuple[ya.Mean, dict[str, Any]]]
"""A loss, with what the model tells beside it."""


class Evaluation:
    """Evaluates states of one run, on all ranks together."""

    def __init__(self, config: Settings, loss_fn: LossAndMore, heldout: Rows, here: Place) -> None:
        there = at_most(heldout) // here.ranks  # rows for each; of few all are one batch
        size = max(1, min(config.data.batch, there))
        self._batches = min(config.eval_batches, there // size) if config.eval_every else 0
        self._read: Callable[[], Iterator[tuple[Batch, Any]]] = lambda: batches(heldout, 0, size, here, seed=0)
        self._step = ya.eval_step(_counted(loss_fn), has_aux=True)

    def loss(self, state: ya.ShardedState) -> tuple[float, dict[str, float]]:
        """The mean over the targets of the first batches of the held-out text, and what else the model tells of them,
        its largest element: of a model with experts the router's loss, and `expert_load`, how much more the busiest
        expert of any layer has to do than all have on average."""
        found = [self._step(state, batch) for batch, _ in islice(self._read(), self._batches)]
        losses = torch.stack([each["loss"].double() for each in found])
        targets = _column(found, "targets")
        told = {name: _column(found, name) for name in found[0]["aux"] if name != "targets"}
        return float((losses * targets).sum() / targets.sum()), {
            name: float(torch.tensordot(targets / targets.sum(), values, 1).max()) for name, values in told.items()
        }

    def sound(self, state: ya.ShardedState, batch: Batch) -> bool:
        """Tells whether the state deserves a checkpoint: the loss of a step is that of the weights before its update,
        which may have ruined them. Costs a forward."""
        numbers = [self._step(state, batch)["loss"].float(), ya.global_norm(state.params).float()]
        return bool(torch.stack(numbers).isfinite().all())


def _column(found: Sequence[Any], name: str) -> Tensor:
    """[batches, ...], what each told."""
    return torch.stack([each["aux"][name].double() for each in found])


def _counted(loss_fn: LossAndMore) -> LossAndMore:
    """Adds the number of targets that the loss is of."""

    def loss(params: Any, batch: Batch) -> tuple[ya.Mean, dict[str, Any]]:
        mean, aux = loss_fn(params, batch)
        return mean, {**aux, "targets": ya.Sum(torch.as_tensor(mean.weight))}

    return loss
