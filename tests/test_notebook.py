"""docs/notebooks/first_schedule.ipynb runs in a plain kernel, and cells that can only print one thing print it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_schedule.ipynb"


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.timeout(400)
def test_the_notebook_runs_and_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    committed = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=300, kernel_name="python3", coalesce_streams=True, resources=where).execute()
    exact = [at for at, cell in enumerate(run.cells) if "exact" in cell.metadata.get("tags", ())]
    assert len(exact) >= 5
    for at in exact:
        assert printed(run.cells[at]) == printed(committed.cells[at])
    assert printed(run.cells[exact[-1]]).count("True") == 4  # the plain loop's losses
    pictures = [
        cell for cell in run.cells if any("image/png" in out.get("data", {}) for out in cell.get("outputs", ()))
    ]
    assert len(pictures) == 2
    assert NOTEBOOK.stat().st_size < 300_000


def test_its_schedule_has_at_most_forty_lines() -> None:
    (cell,) = (each for each in nbformat.read(NOTEBOOK, as_version=4).cells if "%%writefile first_s" in each.source)
    assert len(cell.source.split("def every_other")[1].splitlines()) <= 40
