"""`python -m train.launch.slurm ...`: torchrun, with an agent that lets ranks save that were told to end.

`run.sbatch` runs it on each node of a Slurm job.
"""

from __future__ import annotations

import os
import signal
import sys


def waits_as_told() -> None:
    """Has torchrun's agent wait for ranks that were told to end as long as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says: torch
    2.11 does not know that variable, and kills them after 30 seconds."""
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    close, patience = PContext.close, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

    def close_in_time(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        told = isinstance(sys.exception(), SignalException)
        close(context, death_sig, patience if told else timeout)

    PContext.close = close_in_time  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from torch.distributed.run import main

    waits_as_told()
    main()
