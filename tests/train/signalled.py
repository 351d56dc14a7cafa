"""`python -m tests.train.signalled SIGNAL STEP ...`: `python -m train ...` whose rank 1 signals itself after a step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from train import __main__ as command
from train.running.meter import Meter


def signalling(push: Callable[..., None], number: signal.Signals, at: int) -> Callable[..., None]:
    def pushed(self: Meter, step: int, metrics: Any) -> None:
        push(self, step, metrics)
        if step == at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)

    return pushed


if __name__ == "__main__":
    name, step, *argv = sys.argv[1:]
    Meter.push = signalling(Meter.push, signal.Signals[name], int(step))
    sys.exit(command.main(argv))
