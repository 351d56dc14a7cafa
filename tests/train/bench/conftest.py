"""Benches of tests: their processes are forked."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from tests.harness.forked import Forked
from train.bench import harness


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(harness, "subprocess", popen)
