"""On a slow link what is written is faster than the best builder's step, as predicted. For root, who may make one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.harness.pages import ROOT

MBIT = 100


@contextlib.contextmanager
def throttled(mbit: int) -> Iterator[list[str]]:
    """The beginning of commands that run in a network namespace whose only link, both ways together, carries `mbit`
    Mbit/s. Raises OSError or SubprocessError where there can be none."""
    name = f"slow-{os.getpid()}"
    shape = f"tc -n {name} qdisc add dev lo root tbf rate {mbit}mbit burst {max(256, mbit // 8)}kb latency 500ms"
    try:
        for command in (f"ip netns add {name}", f"ip -n {name} link set lo up", shape):
            subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
        yield ["ip", "netns", "exec", name]
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def ran_throttled(module: str, mbit: int) -> str:
    """What a module prints that measures on such a link. Skips the test where there can be none."""
    with contextlib.ExitStack() as stack:
        try:
            within = stack.enter_context(throttled(mbit))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces, or no shaping of traffic: {error}")
        command = [*within, sys.executable, "-m", module, str(mbit)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=900).stdout


@pytest.mark.nightly
def test_on_a_slow_link_it_is_faster_as_predicted() -> None:
    printed = ran_throttled("tests.planner.throttled", MBIT)
    builder, written, measured_builder, measured_written = json.loads(printed.splitlines()[-1])
    print(f"\n{printed.rpartition('[')[0]}load {os.getloadavg()[0]:.1f}; the best builder's and the written step:")
    print(f"predicted {builder:.3f} and {written:.3f} s, measured {measured_builder:.3f} and {measured_written:.3f} s")
    assert written < 0.95 * builder
    assert measured_written < measured_builder
