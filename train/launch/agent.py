"""`python -m train.launch.agent ...`: torchrun, whose agent lets ranks that were told to end save, as long as they may.

It kills them after 30 seconds, or those of TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which torch 2.11 does not know.
"""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.run import main


def waits_as_told() -> None:
    """Has an agent that got a signal wait as long as the variable says, whatever version of torch it is of."""
    close, patience = PContext.close, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

    def close_in_time(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        told = isinstance(sys.exception(), SignalException)
        close(context, death_sig, patience if told else timeout)

    PContext.close = close_in_time  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    waits_as_told()
    main()
