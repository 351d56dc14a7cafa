"""`python -m benchmarks reading`: what a stranger has to read, counted.

    calls, changes     Python functions of the library that the main thread calls for a further layer of a steady step,
                       and how often the next call is in another file: steps of two depths, and the line through them
    files, lines       those that such a step enters, in any thread
    nodes              AST nodes without docstrings, by folder of the repository and of the library; --budgets: these
                       alone, each within its budget (`BUDGETS`). A budget rises in a commit of its own, that says
                       for what, and what went

The step is `zero3` of a Llama with AdamW, after its warm-up: no tracing, no building.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.contenders import build
from benchmarks.options import Options
from benchmarks.report import Rows, table
from benchmarks.shapes import Shape
from train.machine import ROOT

LIBRARY = ROOT / "yafsdp_fn"
LAYERS = (8, 16)
SHAPE = Shape(dim=256, ffn=384, heads=4, seq=16, batch=1)
GOALS = {"calls": 100, "changes": 31, "files": 22, "lines": 5000}


@dataclasses.dataclass(frozen=True)
class Reading(Options):
    """Count what a steady step calls and enters, and what the library imports and is long."""

    ranks: int = 2
    """Rank processes, with gloo."""
    timeout: float = 300.0
    """Seconds after which rank processes that have not ended are killed."""
    budgets: bool = False
    """Count AST nodes alone, and fail where a folder has more than its budget."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"--ranks {self.ranks}: expected at least 1")


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Calls of a step after warm-up."""
    calls = Calls()  # before the contender, whose threads it is to see
    batch, *_ = task.batches(device)
    contender = build(task.contenders[0], task.shape, microbatches=1, seed=task.seed, device=device)
    for _ in range(task.warmup):
        contender.step(batch)
    calls.count(lambda: contender.step(batch))
    return calls.found()


class Calls:
    """Calls of the library's functions in this process, while `counting`. Made before any thread it is to see."""

    def __init__(self) -> None:
        self.main: list[str] = []
        """File of each call of the main thread, in order."""
        self.files: set[str] = set()
        """Files of the calls of all threads."""
        self.counting = False
        self._thread = threading.get_ident()
        threading.setprofile(self._seen)

    def count(self, work: Callable[[], object]) -> None:
        """Does `work`, with its calls counted. Threads that begin later are not seen."""
        self.counting = True
        sys.setprofile(self._seen)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.counting = False

    def _seen(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        watches = threading.current_thread().name == "yafsdp-watchdog"  # by the clock, not by steps
        if event == "call" and self.counting and file.startswith(str(LIBRARY)) and not watches:
            self.files.add(file)
            if threading.get_ident() == self._thread:
                self.main.append(file)

    def found(self) -> dict[str, Any]:
        changes = sum(a != b for a, b in zip(self.main, self.main[1:], strict=False))
        return {"calls": len(self.main), "changes": changes, "files": sorted(self.files)}


BUDGETS = Path(__file__).with_name("budgets.json")
"""AST nodes that a folder may have."""


class OverBudget(RuntimeError):
    """Folders have more nodes than their budgets."""


def nodes(source: str) -> int:
    """AST nodes of a text without docstrings."""
    tree = ast.parse(source)
    documented = [each for each in ast.walk(tree) if isinstance(each, DOCUMENTED) and ast.get_docstring(each, False)]
    return sum(1 for _ in ast.walk(tree)) - 2 * len(documented)  # an expression and a constant


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sizes(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Nodes and lines by folder: of the repository, and of the library, whose files at the top count as one folder."""
    counted: dict[str, Counter[str]] = {}
    for top in FOLDERS:
        for path in sorted((root / top).rglob("*.py")):
            text = path.read_text()
            inner = path.relative_to(root).parts
            own = [top] if top != LIBRARY.name else [top, f"{top}/{inner[1] if len(inner) > 2 else '*.py'}"]
            for name in own:
                counted.setdefault(name, Counter()).update(nodes=nodes(text), lines=len(text.splitlines()))
    return {name: dict(each) for name, each in sorted(counted.items())}


FOLDERS = (LIBRARY.name, "models", "train", "benchmarks", "tests")


def over_budget(sizes: Mapping[str, Mapping[str, int]], budgets: Mapping[str, int]) -> list[str]:
    """Sentences on folders that have more nodes than their budget, or none of their own."""
    return [
        f"{name} has {size['nodes']:,} nodes, and its budget is {budgets.get(name, 0):,}"
        for name, size in sizes.items()
        if size["nodes"] > budgets.get(name, 0)
    ]


def show_sizes(sizes: Mapping[str, Mapping[str, int]]) -> Table:
    budgets = json.loads(BUDGETS.read_text())
    rows: Rows = {
        name: {
            "nodes": f"{size['nodes']:,}",
            "budget": f"{budgets.get(name, 0):,}",
            "lines": f"{size['lines']:,}",
            "nodes a line": f"{size['nodes'] / max(1, size['lines']):.1f}",
        }
        for name, size in sizes.items()
    }
    return table("folder", rows)


def measure(reading: Reading, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed, OverBudget."""
    counted = sizes()
    if reading.budgets:
        if over := over_budget(counted, json.loads(BUDGETS.read_text())):
            raise OverBudget("; ".join(over) + f": make it smaller, or raise it in {BUDGETS.name} and say for what")
        return {"sizes": counted}
    found = []
    for layers in LAYERS:
        with console.status(f"counting calls of {layers} layers"):
            shape = dataclasses.replace(SHAPE, layers=layers)
            how: dict[str, Any] = {"ranks": reading.ranks, "steps": 0, "warmup": 5, "timeout": reading.timeout}
            found.append(harness.run("benchmarks.reading:rank", ("zero3",), shape=shape, **how))
    few, many = found
    further = {key: (many[key] - few[key]) / (LAYERS[1] - LAYERS[0]) for key in ("calls", "changes")}
    entered = {str(Path(file).relative_to(ROOT)): len(Path(file).read_text().splitlines()) for file in many["files"]}
    return {
        **further,
        "files": len(entered),
        "lines": sum(entered.values()),
        "entered": entered,
        "sizes": counted,
    }


def show(reading: Reading, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each count."""
    yield show_sizes(found["sizes"])
    if reading.budgets:
        return
    what = {
        "calls": "calls per further layer",
        "changes": "changes of file per further layer",
        "files": "files that a step enters",
        "lines": "their lines",
    }
    rows: Rows = {}
    for key, text in what.items():
        met = "reached" if found[key] <= GOALS[key] else "MISSED"
        rows[text] = {"found": f"{found[key]:,.10g}", "goal": f"{GOALS[key]:,} {met}"}
    yield (f"a steady step of zero3 with AdamW, {reading.ranks} rank(s), {LAYERS[0]} and {LAYERS[1]} layers")
    yield table("counted", rows)
    yield table("entered", {name: {"lines": f"{count:,}"} for name, count in sorted(found["entered"].items())})
