"""The command: options in, a table or JSON out, and the step as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import torch
import tyro
from rich.console import Console

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train.bench import schedules
from train.plan.options import PRECISIONS, YAFSDP, Options
from train.plan.report import Result
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Plan, min_ckpt_layers, search, simulate, trace
from yafsdp_fn.planner.cluster import A100, Cluster, cluster
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.schedules import Trace

PROGRAM = "python -m train plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own); returns the exit status.

    That is 2 where nothing fits, but for a number of recomputed layers that was asked for; the plan is shown even so.
    """
    errors = Console(stderr=True)
    try:
        options = tyro.cli(Options, args=argv, prog=PROGRAM)
        result = run(options)
        if options.json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            result.show(Console())
        timeline = result.plan.timeline
        for path, write in ((options.timeline, timeline.save), (options.perfetto, timeline.perfetto)):
            if path is not None:
                write(path)
                errors.print(f"wrote {path}", markup=False, highlight=False)
        if options.ckpt_layers is None:
            result.plan.check()
    except (ValueError, ModuleNotFoundError, OSError) as error:
        errors.print(f"plan: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


def run(options: Options) -> Result:
    """Traces the model, plans its step, and simulates others beside it. Raises DoesNotFit where a search finds none.

    On a100-80g FSDP and YaFSDP are as they were where they were published: on `peers.AS_RUN`.
    """
    config, where = models.CONFIGS[options.model], cluster(options.cluster)
    published = peers.AS_RUN if where is A100 else where
    budget = where.memory_bytes if options.memory_gib is None else int(options.memory_gib * 2**30)
    flat = _traced(options, config, axes(options.gpus))
    found = search(flat, where, memory=budget) if options.search else None
    here, factory = _schedule(options, config, flat, where)
    least = min_ckpt_layers(here, budget, factory)
    fitting = config.layers if least is None else least
    recomputed = fitting if options.ckpt_layers is None else options.ckpt_layers
    again = ya.remat.first(recomputed)
    if found is not None:
        program, name = found.program, str(found.best.point)
    else:
        program, name = (
            factory(remat=again)(here),
            f"{options.schedule}, {recomputed} of {config.layers} layers recomputed",
        )
    plan = Plan.of(program, published if options.schedule == YAFSDP else where, budget)
    others = {
        "fsdp": simulate(peers.fsdp(remat=again)(flat), published),
        "fsdp2": simulate(peers.fsdp2(remat=again)(flat), where),
        "yafsdp": simulate(peers.yafsdp(remat=again)(flat), published),
        "zero3": simulate(ya.schedules.zero3(remat=again)(flat), where),
    }
    return Result(options, plan, name, others, recomputed, least, found)


def _schedule(
    options: Options, config: Shape, flat: Trace, where: Cluster
) -> tuple[Trace, Callable[..., ya.schedules.Schedule]]:
    """The trace on the mesh of what --schedule names, and its factory. flat: the trace on a mesh of shards alone."""
    if options.schedule == YAFSDP:
        return flat, peers.yafsdp
    builder, words = schedules.parse(options.schedule)
    mesh = axes(options.gpus, **_mesh(builder, options, where))
    here = _traced(options, config, mesh, words.get("chunk", 1))
    return here, partial(schedules.make, options.schedule, config.layers)


def _traced(options: Options, config: Shape, mesh: tuple[tuple[str, int], ...], chunks: int = 1) -> Trace:
    tokens = torch.empty((options.batch, options.seq_len), dtype=torch.int64, device="meta")
    return trace(
        models.of(config).loss(config, chunks=chunks),
        models.of(config).params(config),
        {"tokens": tokens, "targets": tokens},
        mesh=mesh,
        precision=PRECISIONS[options.reduce],
        microbatches=options.microbatches,
        tx=ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4)),
    )


def _mesh(builder: str, options: Options, where: Cluster) -> dict[str, int]:
    """What `ya.mesh` takes for a builder."""
    match builder:
        case "hsdp":
            return {"replicate": options.replicate or max(1, options.gpus // where.gpus_per_node)}
        case "ddp":
            return {"replicate": options.gpus}
        case "hpz":
            return {"local": min(where.gpus_per_node, options.gpus)}
        case _:
            return {}
