"""Measures, where this process runs, steps whose matrices travel whole and in int8: `python -m tests.planner.slow_link
MBIT`, on a link of so many Mbit/s that two ranks share. The same is predicted beside it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import yafsdp_fn as ya
from benchmarks.shapes import SHAPES
from models import llama
from yafsdp_fn.planner import simulate, trace
from yafsdp_fn.planner.cluster import LOCAL, Cluster

SHAPE = SHAPES["B"]
CONFIG = SHAPE.llama()
TX = ya.optim.adamw(1e-3)
INT8 = ya.formats.Scaled()
WIRES = {"whole": ya.Wire(), "gathers": ya.Wire(gather=INT8), "both": ya.Wire(INT8, INT8)}
STEPS = 3


def batch(rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (rows, SHAPE.seq), generator=torch.Generator().manual_seed(0)).to(device)
    return {"tokens": tokens, "targets": tokens}


def params(wire: ya.Wire) -> Any:
    tree = llama.params(CONFIG)
    return tree if wire == ya.Wire() else ya.params.with_wire(tree, wire)


def rank(_: int) -> dict[str, list[float]]:
    """Seconds of steps, by turns."""
    torch.set_num_threads(1)
    mesh = ya.mesh()
    loss, mine = llama.loss(CONFIG), batch(1)
    steps = {name: ya.train_step(loss, TX) for name in WIRES}
    states = {name: ya.init(params(wire), TX, mesh=mesh) for name, wire in WIRES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WIRES}
    for _ in range(STEPS + 2):
        for name, step in steps.items():
            began = time.monotonic()
            states[name], metrics = step(states[name], mine)
            metrics["loss"].item()
            states[name].memory.comms.drain()
            seconds[name].append(time.monotonic() - began)
    return {name: each[2:] for name, each in seconds.items()}


def predicted(cluster: Cluster) -> dict[str, float]:
    found = {}
    for name, wire in WIRES.items():
        step = trace(llama.loss(CONFIG), params(wire), batch(1, "meta"), tx=TX, ranks=2)
        found[name] = simulate(ya.schedules.zero3()(step), cluster).seconds
    return found


if __name__ == "__main__":
    link = float(sys.argv[1])
    plan = predicted(LOCAL.replace(gpus_per_node=1, network_bandwidth=link * 1e6 / 8 / 2))
    measured = ya.launch(rank, 0, ranks=2)[0]
    print(json.dumps([plan, {name: statistics.median(each) for name, each in measured.items()}]))
