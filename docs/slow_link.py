"""Steps on a slow link, predicted and measured: what was written beside the best builder's step, and int8 beside whole
weights. From a checkout:

python -m docs.slow_link written|formats MBIT    two ranks that share a link of so many Mbit/s, which root may make:
                                                 seconds predicted, and measured
python -m docs.slow_link      config B with formats and moments in 8 bits over the step without, at one and two ranks:
                              seconds of a processor, so that other work does not count
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import yafsdp_fn as ya
from benchmarks.shapes import SHAPES
from models import llama
from tests.harness.unlike import Model, Sizes
from yafsdp_fn.planner import Synthesized, predict_memory, search, simulate, trace
from yafsdp_fn.planner.cluster import LOCAL, Cluster
from yafsdp_fn.schedules import zero2, zero3

TX = ya.optim.adamw(1e-3)
Seconds = dict[str, float]
"""Of a step, by its name."""


def on_a_link(mbit: float) -> Cluster:
    """Two ranks that share a link of so many Mbit/s."""
    return LOCAL.replace(gpus_per_node=1, network_bandwidth=mbit * 1e6 / 8 / 2)


def by_turns(
    steps: Mapping[str, Any], states: dict[str, Any], batch: Any, rounds: int, clock: Callable[[], float]
) -> Seconds:
    """Medians of steps that take turns; the first two rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            began = clock()
            states[name], metrics = step(states[name], batch)
            metrics["loss"].item()
            states[name].memory.comms.drain()
            seconds[name].append(clock() - began)
    return {name: statistics.median(each[2:]) for name, each in seconds.items()}


# ---- what was written, and the best builder's

MODEL = Model((("global", 8),), Sizes(E=128, F=256, H=4, V=64, S=32))
MICROBATCHES = 4


def written(mbit: float) -> Synthesized:
    """From the best of search, in the memory of zero2: all weights stay, and no sum of gradients."""
    step = trace(MODEL.loss, MODEL.params(), MODEL.batch(MICROBATCHES), tx=TX, ranks=2, microbatches=MICROBATCHES)
    memory = predict_memory(zero2()(step)).peak_bytes
    made = search(step, on_a_link(mbit), memory=memory, synthesize=math.inf, moves=300).synthesized
    assert made is not None
    return made


def time_written(mbit: float) -> Seconds:
    torch.set_num_threads(1)
    made = written(mbit)
    mesh = ya.mesh(**made.mesh)
    batch = ya.shard_batch(MODEL.batch(2 * MICROBATCHES, "cpu"), mesh)
    schedules = {"builder": made.point.schedule(), "written": made}
    steps = {
        name: ya.train_step(MODEL.loss, TX, schedule=schedule, microbatches=MICROBATCHES)
        for name, schedule in schedules.items()
    }
    states = {name: ya.init(MODEL.params(), TX, mesh=mesh, seed=0) for name in steps}
    return by_turns(steps, states, batch, 5, time.monotonic)


# ---- config B with formats

SHAPE = SHAPES["B"]
CONFIG = SHAPE.llama()
INT8 = ya.formats.Scaled()
WIRES = {"whole": ya.Wire(), "gathers": ya.Wire(gather=INT8), "both": ya.Wire(INT8, INT8)}
MOMENTS = {"moments": ya.optim.in_format(TX, ya.formats.Roots())}


def batch_of_b(device: str = "cpu") -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (1, SHAPE.seq), generator=torch.Generator().manual_seed(0)).to(device)
    return {"tokens": tokens, "targets": tokens}


def params_of_b(wire: ya.Wire) -> Any:
    tree = llama.params(CONFIG)
    return tree if wire == ya.Wire() else ya.params.with_wire(tree, wire)


def time_formats(rounds: int, moments: bool, clock: Callable[[], float]) -> Seconds:
    torch.set_num_threads(1)
    mesh = ya.mesh()
    loss = llama.loss(CONFIG)
    txs = dict.fromkeys(WIRES, TX) | (MOMENTS if moments else {})
    steps = {name: ya.train_step(loss, tx) for name, tx in txs.items()}
    states = {name: ya.init(params_of_b(WIRES.get(name, ya.Wire())), tx, mesh=mesh) for name, tx in txs.items()}
    return by_turns(steps, states, batch_of_b(), rounds, clock)


def predicted_formats(mbit: float) -> Seconds:
    found = {}
    for name, wire in WIRES.items():
        step = trace(llama.loss(CONFIG), params_of_b(wire), batch_of_b("meta"), tx=TX, ranks=2)
        found[name] = simulate(zero3()(step), on_a_link(mbit)).seconds
    return found


# ---- the link


@contextlib.contextmanager
def throttled(mbit: int) -> Iterator[list[str]]:
    """The beginning of commands that run in a network namespace whose only link, both ways together, carries `mbit`
    Mbit/s. Raises OSError or SubprocessError where there can be none."""
    name = f"slow-{os.getpid()}"
    shape = f"tc -n {name} qdisc add dev lo root tbf rate {mbit}mbit burst {max(256, mbit // 8)}kb latency 500ms"
    try:
        for command in (f"ip netns add {name}", f"ip -n {name} link set lo up", shape):
            subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
        yield ["ip", "netns", "exec", name]
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def on_the_link(what: str, mbit: int) -> str:
    """Returns what this module prints on such a link, seconds of a step predicted and measured."""
    with throttled(mbit) as within:
        command = [*within, sys.executable, "-m", "docs.slow_link", what, str(mbit), "here"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout
    return printed.splitlines()[-1]


def main(what: str = "", mbit: str = "", where: str = "") -> None:
    if what and not where:
        print(f"load {os.getloadavg()[0]:.1f}; predicted, measured: {on_the_link(what, int(mbit))}")
        return
    if what == "written":
        made = written(float(mbit))
        plan = {"builder": made.builder_s, "written": made.step_s}
        print(json.dumps([plan, ya.launch(time_written, float(mbit), ranks=2)[0]]))
        return
    if what == "formats":
        measured = ya.launch(time_formats, 3, False, time.monotonic, ranks=2)[0]
        print(json.dumps([predicted_formats(float(mbit)), measured]))
        return
    for ranks in (1, 2):
        seconds = ya.launch(time_formats, 5, True, time.process_time, ranks=ranks)[0]
        print(ranks, {name: f"{of * 1e3:.0f} ms, {of / seconds['whole']:.2f}" for name, of in seconds.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
