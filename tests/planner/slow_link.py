"""Measures steps of config B with formats and without, in turn.

python -m tests.planner.slow_link MBIT      where this process runs, on a link of so many Mbit/s that two ranks share,
                                            with what is predicted beside it
python -m tests.planner.slow_link           at one and two ranks, over the step without; moments in 8 bits, too: seconds
                                            of a processor, so that other work on the machine does not count
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import yafsdp_fn as ya
from benchmarks.shapes import SHAPES
from models import llama
from yafsdp_fn.planner import simulate, trace
from yafsdp_fn.planner.cluster import LOCAL, Cluster
from yafsdp_fn.schedules import zero3

SHAPE = SHAPES["B"]
CONFIG = SHAPE.llama()
TX = ya.optim.adamw(1e-3)
INT8 = ya.formats.Scaled()
WIRES = {"whole": ya.Wire(), "gathers": ya.Wire(gather=INT8), "both": ya.Wire(INT8, INT8)}
MOMENTS = {"moments": ya.optim.in_format(TX, ya.formats.Roots())}


def batch(rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (rows, SHAPE.seq), generator=torch.Generator().manual_seed(0)).to(device)
    return {"tokens": tokens, "targets": tokens}


def params(wire: ya.Wire) -> Any:
    tree = llama.params(CONFIG)
    return tree if wire == ya.Wire() else ya.params.with_wire(tree, wire)


def rank(rounds: int, moments: bool, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of steps, by turns."""
    torch.set_num_threads(1)
    mesh = ya.mesh()
    loss = llama.loss(CONFIG)
    mine = batch(1)
    txs = dict.fromkeys(WIRES, TX) | (MOMENTS if moments else {})
    steps = {name: ya.train_step(loss, tx) for name, tx in txs.items()}
    states = {name: ya.init(params(WIRES.get(name, ya.Wire())), tx, mesh=mesh) for name, tx in txs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            began = clock()
            states[name], metrics = step(states[name], mine)
            metrics["loss"].item()
            states[name].memory.comms.drain()
            seconds[name].append(clock() - began)
    return {name: statistics.median(each[2:]) for name, each in seconds.items()}


def predicted(cluster: Cluster) -> dict[str, float]:
    found = {}
    for name, wire in WIRES.items():
        step = trace(llama.loss(CONFIG), params(wire), batch(1, "meta"), tx=TX, ranks=2)
        found[name] = simulate(zero3()(step), cluster).seconds
    return found


def main(link: str = "") -> None:
    if link:
        plan = predicted(LOCAL.replace(gpus_per_node=1, network_bandwidth=float(link) * 1e6 / 8 / 2))
        print(json.dumps([plan, ya.launch(rank, 3, False, time.monotonic, ranks=2)[0]]))
        return
    for ranks in (1, 2):
        seconds = ya.launch(rank, 5, True, time.process_time, ranks=ranks)[0]
        print(ranks, {name: f"{of * 1e3:.0f} ms, {of / seconds['whole']:.2f}" for name, of in seconds.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
