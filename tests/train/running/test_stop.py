"""Signals: the first asks, its echo is the same one, a later one aborts; handlers are given back."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

from train.running import together
from train.running.together import Stopper


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_its_echo_is_ignored(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(together, "DEBOUNCE", math.inf)  # however long this process is held up between the two
    before = signal.getsignal(number)
    with Stopper() as asked:
        assert not asked.agreed()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a launcher forwards what the terminal sent already
        assert asked.requested
        assert asked.agreed()
    assert signal.getsignal(number) is before


def test_a_later_signal_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "DEBOUNCE", 0.0)  # any later moment is late enough
    with pytest.raises(KeyboardInterrupt, match="second SIGINT: aborted without a checkpoint"), Stopper():
        os.kill(os.getpid(), signal.SIGINT)
        began = time.monotonic()
        while time.monotonic() == began:
            pass
        os.kill(os.getpid(), signal.SIGINT)
