"""`python -m train bench`: a training step of our schedules against FSDP2, DDP and the plain module; other benches.

    names, options   contenders by name; models and options         contenders   all of them, behind `step(batch)`
    harness          rank processes, turns, seconds                  counting     memory, allocations, collectives
    report           spreads, tables, JSON                           worker       a process of any bench
    steps, ablate, axes, control, growth, head, lora, reading, saves, stages    a command each (`command`)
    cuda/            every GPU figure

Contenders take turns step by step, so a machine that slows down slows all of them, and the ratio of one round is
meaningful where two separate runs are not.
"""

from train.bench.command import main

__all__ = ["main"]
