"""A rank as `python -m train` makes it, on a tiny model, that notes its steps and dies inside of a save when told to.

$CHAOS/steps          a line a step of rank 0: pid, step, time
$CHAOS/rows-RANK      a line a step: JSON of at (time), step, rank, ranks, attempt, and rows, what it was trained on
$CHAOS/kill-RANK      a number n: the rank kills itself at its n-th fsync from then on
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import models
from models import llama
from train import __main__ as command
from train.data.rows import Batch, Reader
from train.running.meter import Meter

TINY = llama.Config(vocab=256, embed=16, ffn=24, layers=2, heads=2, kv_heads=1, head_dim=8, max_length=64)
PAUSE = 0.01
"""Seconds after each step: a run lasts long enough for something to happen to it."""

FOLDER = Path(os.environ["CHAOS"])
RANK = os.environ["RANK"]
push = Meter.push
fsync = os.fsync
next_batch = Reader.next
read: list[str] = []


def reads(self: Reader) -> Batch:
    batch = next_batch(self)
    read[:] = [bytes(row.tolist()).decode() for row in batch["tokens"]]
    return batch


def noted(self: Meter, step: int, metrics: Any) -> None:
    push(self, step, metrics)
    if RANK == "0":
        with (FOLDER / "steps").open("a") as stream:
            stream.write(f"{os.getpid()} {step} {time.time()}\n")
    where = {"rank": int(RANK), "ranks": int(os.environ["WORLD_SIZE"]), "attempt": os.environ["MASTER_PORT"]}
    with (FOLDER / f"rows-{RANK}").open("a") as stream:
        stream.write(json.dumps({"at": time.time(), "step": step, **where, "rows": read}) + "\n")
    time.sleep(PAUSE)


def mortal(handle: int) -> None:
    order = FOLDER / f"kill-{RANK}"
    if order.exists():
        left = int(order.read_text())
        if left == 0:
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        order.write_text(str(left - 1))
    fsync(handle)


if __name__ == "__main__":
    models.CONFIGS["tiny"] = TINY
    Meter.push, os.fsync, Reader.next = noted, mortal, reads
    sys.exit(command.flushed(sys.argv[1:]))
