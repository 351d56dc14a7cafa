"""Runs from other people: what their checkpoints say is checked, and no link in their folders is followed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.marks import nightly
from tests.harness.pool import Pools
from tests.train.inside import Runs, flags, inside
from train.page.command import Options, write

ODD = [
    None,
    True,
    -1,
    2**62,
    2**200,
    1.5,
    float("nan"),
    "",
    "17",
    [],
    {},
    [[]],
    {"rows": 1},
    {"place": [0], "tokens": 0},
    {"rows": 1, "sources": 3},
    {"place": [0, 0, None, 0], "tokens": 0},
]
PAIR = [1.0, 2.0]
SPIKES = [
    None,
    1,
    "x",
    {},
    [1],
    [[1]],
    [[1, 2, 3]],
    [["a", "b"]],
    [[True, 1.0]],
    [[1.0, float("inf")]],
    [PAIR] * 129,
    [PAIR, None],
    [[10**400, 1]],
]
EXTRAS = {
    "position": [*({"position": each} for each in ODD), None],
    "text": [*({"text": each} for each in (None, 1, [], {}, [[[]]])), None],
    "sharding": [{"sharding": each} for each in (None, 1, [], {})],
    "spikes": [{"spikes": each} for each in SPIKES],
}
"""By field: what is written in its place; None: nothing."""


NEST = "a nest"


def rewritten(folder: Path, extra: Any, nest: str = "") -> Path:
    """The checkpoint with another `extra`, and digests that agree. nest: stands for NEST"""
    (found,) = (folder / "runs" / "a" / "checkpoints").glob("step-*")
    manifest = found / "manifest.json"
    values = json.loads(manifest.read_text()) | {"extra": extra}
    manifest.write_text(json.dumps(values).replace(json.dumps(NEST), nest))
    lines = [
        f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n"
        for each in found.iterdir()
        if each.name != "SHA256SUMS"
    ]
    (found / "SHA256SUMS").write_text("".join(sorted(lines)))
    return manifest


def resumed_from(mesh: Any, folder: Path, argv: tuple[str, ...], good: dict[str, Any]) -> list[str]:
    """Of each odd `extra` the field, and the error."""
    found = []
    for field, changes in EXTRAS.items():
        for change in changes:
            extra = {**good, **(change or {})}
            if change is None:
                del extra[field]
            rewritten(folder, extra)
            found.append(f"{field} {str(change)[:60]} -> {inside(mesh, argv).error}")
    return found


@pytest.mark.nightly
def test_an_odd_extra_is_refused_in_a_line_that_names_file_and_field(pools: Pools, runs: Runs, tmp_path: Path) -> None:
    runs(1, "--keep", "1", "--skip-spikes", "6")
    (manifest,) = (runs.path / "checkpoints").glob("step-*/manifest.json")
    good = json.loads(manifest.read_text())["extra"]
    argv = flags(tmp_path, "--resume", "--steps", "13")
    (found,) = pools[1].run(resumed_from, tmp_path, argv, good, timeout=400)
    assert len(found) == sum(map(len, EXTRAS.values())) > 35
    for each in found:
        field = each.split()[0]
        assert f"-> ConfigError: {manifest}: extra.{field}" in each, each
        assert len(each.splitlines()) == 1 and len(each) < 600, each


def test_a_nest_in_a_manifest_is_refused_on_every_rank(runs: Runs, tmp_path: Path) -> None:
    """Messages between ranks are pickled, which fails at some hundreds of levels, and reading JSON at a thousand."""
    runs(2, "--keep", "1")
    refusals = {700: "ConfigError: {}: extra.", 100_000: "CheckpointError: {} is no JSON (RecursionError"}
    for levels, refused in refusals.items():
        manifest = rewritten(tmp_path, {"position": NEST}, "[" * levels + "]" * levels)
        for one in runs(2, "--resume", "--steps", "13"):
            assert refused.format(manifest) in one.error, one.error


FILES = [
    "lock",
    "config.json",
    "config.json.partial",
    "metrics.jsonl",
    "metrics.jsonl.partial",
    "events.jsonl",
    "timeline.json",
    "timeline.json.partial",
    "report.html",
    "report.html.partial",
    "checkpoints/latest",
    "checkpoints/latest.partial",
    "checkpoints/step-00000016",
    "tokenizer.partial",
    "checkpoints/step-00000016.partial",
    "checkpoints/step-00000012.replaced",
    "checkpoints/step-00000002.partial",
]
FOLDERS = [
    "tensorboard",
    "checkpoints",
    "tokenizer",
    "tokenizer.partial",
    "checkpoints/step-00000016",
    "checkpoints/step-00000016.partial",
    "checkpoints/step-00000002.replaced",
]
LINKS = [(name, kind) for name in FILES for kind in ("file", "nothing")] + [(name, "folder") for name in FOLDERS]


def outside(folder: Path) -> dict[str, Any]:
    """All that is there, with its content; the victims alone."""
    found = sorted((folder / "victims").rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def planted(folder: Path, name: str, kind: str) -> None:
    victims = folder / "victims"
    link = folder / "runs" / "a" / name
    shutil.rmtree(victims, ignore_errors=True)
    victims.mkdir()
    (victims / "file").write_text("mine")
    (victims / "folder" / "step-00000001").mkdir(parents=True)
    (victims / "folder" / "step-00000001.partial").mkdir()
    (victims / "folder" / "tokenizer.json").write_text("mine")
    if kind == "folder" and link.is_dir():
        shutil.copytree(link, victims / "folder", dirs_exist_ok=True)
        shutil.rmtree(link)
    elif link.exists():
        if kind == "file":
            (victims / "file").write_bytes(link.read_bytes())
        link.unlink()
    link.symlink_to(victims / kind)


def goes_on(mesh: Any, folder: Path, argv: tuple[str, ...], links: list[tuple[str, str]]) -> list[str]:
    """Names of the links that led somewhere."""
    run = folder / "runs" / "a"
    kept = folder / "kept"
    led = []
    run.rename(kept)
    for name, kind in links:
        shutil.copytree(kept, run)
        planted(folder, name, kind)
        before = outside(folder)
        error = inside(mesh, argv).error
        first = error.partition(":")[0]
        assert first in ("", "ConfigError", "CheckpointError"), error
        if not error:
            write(Options((run,)))
        if outside(folder) != before:
            led.append(f"{name} to a {kind}")
        shutil.rmtree(run)
    return led


@pytest.mark.parametrize("links", [LINKS[::6], nightly(LINKS)], ids=["some", "all"])
def test_no_link_in_a_folder_is_followed_by_a_resume(
    pools: Pools, runs: Runs, tmp_path: Path, links: list[tuple[str, str]]
) -> None:
    fine = runs(1, "--keep", "2", "--timeline-every", "50")
    assert not fine[0].error
    argv = flags(tmp_path, "--resume", "--steps", "16", "--timeline-every", "2")
    (led,) = pools[1].run(goes_on, tmp_path, argv, links, timeout=500)
    assert led == []


def reports(mesh: Any, folder: Path) -> None:
    run = folder / "runs" / "a"
    other = shutil.copytree(run, folder / "runs" / "b")
    for name, folders in (("report.html", (run,)), ("report-a-b.html", (run, other))):
        for suffix in ("", ".partial"):
            for kind in ("file", "nothing"):
                planted(folder, f"{name}{suffix}", kind)
                before = outside(folder)
                write(Options(folders))
                assert outside(folder) == before, f"{name}{suffix} to a {kind}"
                assert "</html>" in (run / name).read_text()
                assert not (run / name).is_symlink()


def test_no_link_is_followed_by_a_report(pools: Pools, runs: Runs, tmp_path: Path) -> None:
    runs(1)
    pools[1].run(reports, tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "lock"])
def test_a_pipe_in_the_place_of_a_file_is_refused(runs: Runs, name: str) -> None:
    runs(1)
    path = runs.path / name
    path.unlink()
    os.mkfifo(path)
    (one,) = runs(1, "--resume", "--steps", "13")
    assert one.error.startswith(f"ConfigError: {path} is something else, expected a file"), one.error
