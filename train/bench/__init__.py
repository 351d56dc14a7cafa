"""`python -m train bench`: one training step of our schedules, and of FSDP2, DDP and the plain module.

    start R rank processes with every contender in them      # launch.py, processes.py, worker.py
    for round in range(-warmup, steps):                      # timing.py, of all benches
        for contender in order(round): barrier; time(contender.step(batch[round]))
    for contender in contenders:                             # counting.py
        start R rank processes with this contender alone: peak memory, allocations, collectives
    refuse if the losses differ, else print                  # report.py

`bench ablate`, `growth`, `head`, `lora` and `optimizers` time other contenders in the same way, `cuda/` on a GPU;
`bench reading` counts.

Contenders take turns step by step, so a machine that slows down slows all of them, and the ratio of one round is
meaningful where two separate runs are not.
"""

from train.bench.cli import main

__all__ = ["main"]
