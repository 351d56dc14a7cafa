"""A few events of `make chaos`: whole runs, whose processes are forks here, and what they leave."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos.harness import EVENTS, Wrong, campaign, compare

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),  # whole runs, whatever else this machine has to do
    pytest.mark.skipif(sys.platform != "linux", reason="who is whose child is read from /proc"),
]


def test_a_run_that_much_happens_to_has_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    events = ("fill the disk", "kill inside a save", "kill the launcher")
    assert set(events) <= set(EVENTS)
    chaos = campaign(tmp_path, events, seed=1, steps=90, every=10, say=print, forks=True)
    assert sum(chaos.counts.values()) == 3
    assert chaos.recovered

    other = tmp_path / "runs" / "other"  # a comparison that finds nothing would be none
    shutil.copytree(tmp_path / "runs" / "unbroken", other)
    path = other / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"loss": 1.0})]))
    with pytest.raises(Wrong, match="other losses"):
        compare(tmp_path / "runs" / "unbroken", other)
