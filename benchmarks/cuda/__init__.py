"""`python -m benchmarks --section NAME`: the GPU figures, a section a command.

    emulated         rank 0 of N beside FSDP2, on published configurations and their network, scaled
    memory           peaks against the planner's

`make gpu-check` runs some of them, each within its budget; with `--device cpu` the same code runs on tiny models.
"""

from benchmarks.cuda.command import main, wanted

__all__ = ["main", "wanted"]
