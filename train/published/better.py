"""`python -m train published --better`: what the planner expects to beat the published schedule, row by row.

    yafsdp        the published one, as simulated: what the others are to be compared with
    zero3         this project's, as many layers recomputed
    search        the fastest under the memory of the cluster's preset: builder, mesh, residence, recomputed layers
    bf16          the same with gradients reduced in bf16
    8 bits        what search finds for bf16, with half the bytes in gathers and reductions; casts are not counted

All of them with the overhead that the published runs had (`peers.AS_RUN`), so that schedules alone differ. Nobody has
measured any of these. What narrower numbers do to training is another question.
"""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from train.published.fit import PRECISION, Row, predict, rows, traced
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import Found, search, simulate
from yafsdp_fn.schedules import Trace

BF16 = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


def found(row: Row, precision: ya.Precision = PRECISION) -> Found:
    """What search finds for a row."""
    return search(traced(row, precision), peers.AS_RUN, runners_up=0)


def with_half_the_bytes(trace: Trace) -> Trace:
    """The same step, with units half as wide on the wire."""
    halved = [u._replace(gather_bytes=u.gather_bytes // 2, reduce_bytes=u.reduce_bytes // 2) for u in trace.units]
    return trace._replace(units=tuple(halved))


def better(row: Row) -> tuple[dict[str, float], Found]:
    """Seconds by name, and what search found for bf16."""
    remat = ya.remat.first(row.ckpt_layers)
    plain, bf16 = found(row), found(row, BF16)
    narrow = bf16.best.point.schedule()(with_half_the_bytes(bf16.program.trace))
    seconds = {
        "yafsdp": predict(row, peers.yafsdp(remat=remat)),
        "zero3": predict(row, ya.schedules.zero3(remat=remat)),
        "search": plain.best.step_s,
        "bf16": bf16.best.step_s,
        "8 bits": simulate(narrow, peers.AS_RUN).seconds,
    }
    return seconds, bf16


def show() -> None:
    """Prints a line per row."""
    print("predictions in seconds per step; nothing here was measured but the first column")
    names = ("measured", "yafsdp", "zero3", "search", "bf16", "8 bits")
    print(f"{'':<46} {' '.join(f'{name:>8}' for name in names)}  found for bf16")
    for row in rows():
        seconds, bf16 = better(row)
        cells = " ".join(f"{value:8.2f}" for value in (row.yafsdp_s, *seconds.values()))
        print(f"{row!s:<46} {cells}  {bf16.best.point}", flush=True)
