"""docs/torchtitan.md: its code, as it is written, and its commands."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.calibration import brief
from tests.harness.pages import blocks, doc
from tests.harness.pool import Pools
from train.command_line import cli
from train.plan.step import Options

PAGE = doc("torchtitan")
COMMANDS = re.findall(r"^    python -m train plan (.*)$", PAGE, re.M)
PIPELINE, *BLOCKS = blocks(PAGE)
SMALLER = {"range(6)": "range(2)", "8 * 128": "4 * 8", "(8, 128)": "(4, 8)", "microbatches=8": "microbatches=4"}


def smaller(block: str) -> str:
    for large, small in SMALLER.items():
        block = block.replace(large, small)
    return block


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_options_of_a_plan(command: str) -> None:
    options = cli(Options, shlex.split(command, comments=True), prog="plan")
    assert options.model == "llama3.1-8b"
    assert options.gpus == 64


def test_a_pipelines_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(smaller(PIPELINE), {"__name__": "page"})
    rows = Path("schedule.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("0F0,")
    assert "stage=4" in capsys.readouterr().out


def run_blocks(_: Any, folder: str) -> str:
    """One rank's part, of fewer layers and tokens."""
    names = {"__name__": "page"}
    with contextlib.chdir(folder), contextlib.redirect_stdout(None), brief():
        for block in BLOCKS:
            exec(smaller(block), names)
    return str(names["with_copies"])


def test_its_code_runs_on_two_ranks(pools: Pools, tmp_path: Path) -> None:
    """It writes both, and FSDP2's ranges are those that the page's table names, as many as ops."""
    program, _ = pools[2].run(run_blocks, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json", "rank1.json", "predicted.json"}
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    ranges = Counter(event["name"] for event in events if event["name"].startswith("FSDP::"))
    rows = re.findall(r"^\| `(\w+ layers\[0\])` \| .*?`(FSDP::[^`]*)` \|$", PAGE, re.M)
    assert len(rows) == 4
    for op, name in rows:
        assert ranges[name] == program.count(op + " ") > 0, (op, name)
