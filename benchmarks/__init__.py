"""`python -m benchmarks`: a training step of our schedules against FSDP2, DDP and the plain module; other benches.

    names, options   contenders by name; models and options         contenders   all of them, behind `step(batch)`
    harness          rank processes, turns, seconds                  counting     memory, allocations, collectives
    report           spreads, tables, JSON                           worker       a process of any bench
    steps, ablate, growth, head, lora, reading, saves, stages       a command each (`command`)
    cuda/            every GPU figure
    emulated/        this process as a rank of a cluster that does not exist
    published/       the planner against published runs

Contenders take turns step by step, so a machine that slows down slows all of them, and the ratio of one round is
meaningful where two separate runs are not.
"""
