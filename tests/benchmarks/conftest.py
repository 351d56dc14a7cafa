"""Benches of tests: their processes are forked."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import harness
from tests.harness.child_process import in_child
from tests.harness.forked import Forked

__all__ = ["in_child"]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(harness, "subprocess", popen)
