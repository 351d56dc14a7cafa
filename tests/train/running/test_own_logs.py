"""`--log FILE.py:NAME`: a function of a user's that rank 0 calls with each line of metrics.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.inside import Runs, lines, of_others, resumed
from train.config import ConfigError
from train.settings import Config

PAGE = Path(__file__).parents[3] / "docs" / "running.md"
STAND_IN = """
import json, os

def init(project):
    (open({seen!r}, "a")).write(json.dumps(["begun", project]) + chr(10))
    return Run()

class Run:
    def log(self, numbers):
        if numbers["step"] == {raises}:
            raise ConnectionError("no server")
        (open({seen!r}, "a")).write(json.dumps(numbers) + chr(10))
"""
"""A module in place of wandb."""


MLFLOW = """
import json, os

def set_experiment(name):
    (open({seen!r}, "a")).write(json.dumps(["begun", name]) + chr(10))

def log_metrics(metrics, step):
    numbers = dict((key, float(value)) for key, value in metrics.items())
    (open({seen!r}, "a")).write(json.dumps(dict(step=step, **numbers)) + chr(10))
"""
"""A module in place of mlflow, which takes numbers alone, and the step apart."""


def on_the_page(column: int = 0) -> str:
    """A column of the page's example."""
    block = PAGE.read_text().partition("    # mine.py,")[2].partition("\n\n")[0]
    lines = [re.split(r"\s{6,}", line[4:].strip())[column] for line in block.splitlines()[1:]]
    return "\n".join([*lines[:-1], f"    {lines[-1]}"])


def logged(runs: Runs, name: str, module: str, page: str, *more: str, **words: Any) -> tuple[Any, Any, list[Any]]:
    """A run of two ranks with `module` in place of a library; what that was told first, and then."""
    seen = runs.folder / "seen"
    own = runs.folder / "mine.py"
    text = module.format(seen=str(seen), **words)
    made = f"import sys, types\nsys.modules[{name!r}] = it = types.ModuleType({name!r})\nexec({text!r}, vars(it))"
    own.write_text(f"{made}\n{page}\ndel sys.modules[{name!r}]")  # other tests run in the same process
    ranks = runs.fine(2, *more, "--log", f"{own}:log")
    begun, *told = map(json.loads, seen.read_text().splitlines())
    return ranks, begun, told


@pytest.mark.parametrize("raises", [-1, 3])
def test_rank_0_calls_it_with_every_line(raises: int, runs: Runs, tmp_path: Path) -> None:
    ranks, begun, told = logged(runs, "wandb", STAND_IN, on_the_page(), "--steps", "6", raises=raises)
    kept = lines(tmp_path)
    assert begun == ["begun", "mine"]
    assert len(kept) == 6
    assert told == (kept if raises < 0 else kept[:2])
    assert [("it is not called again" in rank.err) for rank in ranks] == [raises > 0, False]


def test_mlflow_gets_numbers_and_the_step_apart(runs: Runs, tmp_path: Path) -> None:
    """The other column of the page."""
    _, begun, told = logged(runs, "mlflow", MLFLOW, on_the_page(1), "--steps", "4")
    kept = lines(tmp_path)
    assert begun == ["begun", "mine"]
    assert told == kept
    assert len(kept) == 4


def test_a_file_that_cannot_be_run_is_refused_on_all_ranks_before_there_is_a_run(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_like_it\n")
    found = {rank.error for rank in runs(2, "--log", f"{tmp_path / 'mine.py'}:log")}
    (error,) = found
    assert "ConfigError: log: " in error
    assert "ModuleNotFoundError: No module named 'nothing_like_it'" in error
    assert not (runs.path / "config.json").exists()


def test_a_config_of_others_logs_nowhere(tmp_path: Path) -> None:
    """Only the command line says what code is run."""
    assert resumed(of_others(tmp_path, log="evil.py:f")).log == ""
    with pytest.raises(ConfigError, match=r"log is 'wandb': expected FILE.py:NAME"):
        Config(log="wandb")
