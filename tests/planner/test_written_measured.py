"""On a slow link what is written is faster than the best builder's step, as predicted. For root, who may make one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.bench.control import throttled

ROOT = Path(__file__).resolve().parents[2]
MBIT = 100


@pytest.mark.nightly
def test_on_a_slow_link_it_is_faster_as_predicted() -> None:
    with contextlib.ExitStack() as stack:
        try:
            within = stack.enter_context(throttled(MBIT))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces, or no shaping of traffic: {error}")
        command = [*within, sys.executable, "-m", "tests.planner.throttled", str(MBIT)]
        ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    builder, written, measured_builder, measured_written = json.loads(ran.stdout.splitlines()[-1])
    print(f"\n{ran.stdout.rpartition('[')[0]}load {os.getloadavg()[0]:.1f}; the best builder's and the written step:")
    print(f"predicted {builder:.3f} and {written:.3f} s, measured {measured_builder:.3f} and {measured_written:.3f} s")
    assert written < 0.95 * builder and measured_written < measured_builder
