"""docs/notebooks/first_schedule.ipynb runs in a plain kernel, and cells that can only print one thing print it.

The kernel and the ranks that it launches are forks: a process that imports torch, six times over, shows nothing more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient

from tests.harness.forked import Forked
from tests.harness.pages import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_schedule.ipynb"


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_cells_before_the_ranks_say_what_they_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, up to the cell that writes what ranks run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("os.chdir", lambda folder: None)
    names: dict[str, Any] = {}
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    (ranks,) = (at for at, cell in enumerate(cells) if cell.source.startswith("%%writefile run.py"))
    compared = 0
    for cell in cells[:ranks]:
        if cell.source.startswith("%%writefile "):
            first, _, source = cell.source.partition("\n")
            (tmp_path / first.split()[1]).write_text(source)
            continue
        exec(cell.source, names)
        said = capsys.readouterr().out
        if "exact" in cell.metadata.get("tags", ()):
            assert said == printed(cell)
            compared += 1
    assert compared >= 3
    monkeypatch.delitem(sys.modules, "first_schedule")


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_notebook_runs_and_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(command: list[str], **options: Any) -> Forked:
        env = options["env"] | {"OMP_NUM_THREADS": "1"}  # threads of two processes on two cores wait for each other
        module = [sys.executable, *command[command.index("-m") :]]
        with (tmp_path / "said").open("w") as said:
            process = Forked(module, env=env, stdout=said, stderr=said, cwd=tmp_path, start_new_session=True)
        process.stdin = process.stdout = process.stderr = None
        return process

    monkeypatch.setattr(local_provisioner, "launch_kernel", forked)
    committed = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    run.cells.insert(0, nbformat.v4.new_code_cell("from tests.harness import launching; launching.by_forks()"))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=300, kernel_name="python3", coalesce_streams=True, resources=where).execute()
    del run.cells[0]
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
