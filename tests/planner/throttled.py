"""Measures, where this process runs, the best builder's step and the one that was written from it: `python -m
tests.planner.throttled MBIT`, on a link of so many Mbit/s that two ranks share."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time

import torch

import yafsdp_fn as ya
from tests.harness.unlike import Model, Sizes
from yafsdp_fn.planner import Synthesized, predict_memory, search, trace
from yafsdp_fn.planner.cluster import LOCAL
from yafsdp_fn.schedules import zero2

MODEL = Model((("global", 8),), Sizes(E=128, F=256, H=4, V=64, S=32))
TX = ya.optim.adamw(1e-3)
MICROBATCHES, STEPS = 4, 5


def written(mbit: float) -> Synthesized:
    """From the best of search, in the memory of zero2: all weights stay, and no sum of gradients."""
    cluster = LOCAL.replace(gpus_per_node=1, network_bandwidth=mbit * 1e6 / 8 / 2)
    step = trace(MODEL.loss, MODEL.params(), MODEL.batch(MICROBATCHES), tx=TX, ranks=2, microbatches=MICROBATCHES)
    memory = predict_memory(zero2()(step)).peak_bytes
    made = search(step, cluster, memory=memory, synthesize=math.inf, moves=300).synthesized
    assert made is not None
    return made


def rank(mbit: float) -> list[list[float]]:
    """Seconds of steps: the builder's, and those of what was written, by turns."""
    torch.set_num_threads(1)
    made = written(mbit)
    mesh = ya.mesh(**made.mesh)
    batch = ya.shard_batch(MODEL.batch(2 * MICROBATCHES, "cpu"), mesh)
    programs = made.point.schedule(), made
    steps = [ya.train_step(MODEL.loss, TX, schedule=each, microbatches=MICROBATCHES) for each in programs]
    states = [ya.init(MODEL.params(), TX, mesh=mesh, seed=0) for _ in steps]
    seconds: list[list[float]] = [[], []]
    for _ in range(STEPS + 2):
        for at, step in enumerate(steps):
            began = time.monotonic()
            states[at], metrics = step(states[at], batch)
            metrics["loss"].item()
            seconds[at].append(time.monotonic() - began)
    return [each[2:] for each in seconds]


if __name__ == "__main__":
    link = float(sys.argv[1])
    both = ya.launch(rank, link, ranks=2)[0]
    plan = written(link)
    print(plan)
    print(json.dumps([plan.builder_s, plan.step_s, *map(statistics.median, both)]))
