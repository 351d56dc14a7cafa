"""Ctrl-C at any line of the library: either the state is as before, or it says that it is gone. Never in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, batch, bits, loss, same, state
from tests.harness.marks import nightly
from yafsdp_fn.optim.step import kernels
from yafsdp_fn.util.randomness import in_step

LIBRARY = str(Path(ya.__file__).parent)
EVERY, SELDOM = 23, 61
"""Lines between two that are tried; a prime, so that loops are hit at all of their lines."""


class Interrupt:
    """Counts the lines that run in the library, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.lines, self.where = at, 0, ""

    @contextmanager
    def running(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                self.where = f"{frame.f_code.co_filename[len(LIBRARY) + 1 :]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


OPTIMIZERS = {"fused": TX, "plain": ya.optim.assume_elementwise((TX.init, TX.update))}


@pytest.mark.parametrize(
    ("optimizer", "each"), [("fused", SELDOM), *(nightly(optimizer, EVERY) for optimizer in OPTIMIZERS)]
)
def test_at_any_line_of_a_step(optimizer: str, each: int) -> None:
    tx = OPTIMIZERS[optimizer]
    step = ya.train_step(loss, tx)
    base, _ = step(state(tx=tx), batch())
    expected = bits(step(base.copy(), batch())[0])
    whole = Interrupt(None)
    fresh = base.copy()
    with whole.running():
        step(fresh, batch())
    unchanged = gone = 0
    for at in range(0, whole.lines, each):
        now = base.copy()
        interrupt = Interrupt(at)
        try:
            with interrupt.running():
                step(now, batch())
        except KeyboardInterrupt:
            pass
        else:  # it had fewer lines than the one that was counted: an event that is over is not waited for
            assert interrupt.lines <= at
            continue
        assert not in_step(), interrupt.where
        try:
            new, _ = step(now, batch())
        except RuntimeError as error:
            assert "donated" in str(error) or "interrupted" in str(error), interrupt.where
            gone += 1
            continue
        assert same(bits(new), expected), f"interrupted at {interrupt.where}"
        unchanged += 1
    assert unchanged > 9 * gone > 0


def test_inside_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the optimizer has written parameters, but the new state is not there yet, the old one must not pass."""
    kernel = kernels.fused_adamw
    armed = False

    def interrupted(*args: Any, **options: Any) -> None:
        kernel(*args, **options)
        if armed:
            raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "fused_adamw", interrupted)  # a state keeps what its first step has found
    now, step = state(), ya.train_step(loss, TX)
    for _ in range(2):
        now, _ = step(now, batch())
    armed = True
    with pytest.raises(KeyboardInterrupt):
        step(now, batch())
    for use in (lambda: step(now, batch()), lambda: ya.unshard(now), lambda: ya.eval_step(loss)(now, batch())):
        with pytest.raises(RuntimeError, match="interrupted") as caught:
            use()
        assert "checkpoint" in str(caught.value)
