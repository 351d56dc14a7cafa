"""`python -m train bench --device cuda`: every GPU figure, in one command and one JSON.

    calibration      what the device reaches
    one rank         step time over the plain compiled module, tokens/s, MFU
    emulated         rank 0 of N beside FSDP2, on published configurations and their network, scaled
    memory           peaks against the planner's
    order            a profiler's trace against our timeline
    levers           what each one buys

Sections run in processes of their own, in the order of their value, within a time budget (`command`); on the CPU the
same code runs on tiny models.
"""

from train.bench.cuda.command import main, wanted

__all__ = ["main", "wanted"]
