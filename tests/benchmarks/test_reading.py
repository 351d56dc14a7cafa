"""What is counted is what there is."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest

from benchmarks import reading
from benchmarks.command import main
from benchmarks.reading import BUDGETS, Calls, nodes, over_budget, sizes
from yafsdp_fn.params import tree


def test_calls_of_the_library_and_changes_of_file_are_counted() -> None:
    calls = Calls()
    calls.count(lambda: [tree.named_leaves({"a": 1}) for _ in range(2)])
    tree.named_leaves({"a": 1})  # not counted
    found = calls.found()
    assert threading.getprofile() is None  # else the profiler sees the threads of all that comes after
    assert found["calls"] >= 2
    assert found["files"] == [tree.__file__]
    assert found["changes"] == 0


def test_nodes_are_counted_without_docstrings() -> None:
    bare = "def f(x):\n    return x + 1\n"
    told = '"""A module."""\ndef f(x):\n    """Adds one."""\n    # to what it is given\n    return x + 1\n'
    assert nodes(bare) == nodes(told) == 10


here = functools.cache(sizes)
"""Of this repository, all of which is read."""


def test_no_folder_has_more_nodes_than_its_budget() -> None:
    """Else make it smaller, or raise the budget in a commit of its own that says for what, and what went."""
    assert over_budget(here(), json.loads(BUDGETS.read_text())) == []


def test_a_folder_over_its_budget_is_named(tmp_path: Path) -> None:
    for file in ("yafsdp_fn/errors.py", "yafsdp_fn/communication/flat.py", "train/clm.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    found = sizes(tmp_path)
    assert found["yafsdp_fn"] == {"nodes": 10, "lines": 2}
    assert found["yafsdp_fn/*.py"] == found["yafsdp_fn/communication"]
    budgets = {"yafsdp_fn": 10, "yafsdp_fn/*.py": 5, "yafsdp_fn/communication": 4}
    assert over_budget(found, budgets) == [
        "train has 5 nodes, and its budget is 0",
        "yafsdp_fn/communication has 5 nodes, and its budget is 4",
    ]


def test_the_command_counts_a_step(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "sizes", here)
    out = tmp_path / "reading.json"
    assert main(["reading", "--ranks", "1", "--save", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["calls"] > found["changes"] > 10
    assert {"yafsdp_fn/runtime/execute.py", "yafsdp_fn/runtime/visit.py"} < set(found["entered"])
    assert found["lines"] < found["sizes"]["yafsdp_fn"]["lines"]
    assert "calls per further layer" in capfd.readouterr().out
