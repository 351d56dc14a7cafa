"""The command: a section that fails loses nothing of what it had found."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.command import main
from benchmarks.cuda import command, wanted
from benchmarks.cuda.command import Gpu, Section
from train.machine import ROOT

FAULTY = "tests.benchmarks.cuda.faulty:run"


def test_a_section_that_fails_keeps_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "gpu.json"
    with pytest.raises(RuntimeError, match="no such luck"):
        command.run(Gpu("memory", device="cpu", out=out), Section(FAULTY))
    found = json.loads(out.read_text())
    assert found == {"part": 1, "device": "cpu"}


@pytest.mark.nightly
def test_it_runs_and_ends(tmp_path: Path) -> None:
    words = f"benchmarks --section memory --device cpu --out {tmp_path / 'gpu.json'}"
    ran = subprocess.run([sys.executable, "-m", *shlex.split(words)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "bench: memory: 1B, seq 8192: within 3% of the plan: " in ran.stdout
    assert json.loads((tmp_path / "gpu.json").read_text())["goals"]


@pytest.mark.parametrize(
    ("argv", "is_wanted"),
    [
        ("--section memory", True),
        ("--device cpu --section=memory", True),
        ("--device cuda", False),
        ("saves --save x", False),
        ("", False),
    ],
)
def test_which_of_the_two_benches_is_meant(argv: str, is_wanted: bool) -> None:
    assert wanted(argv.split()) == is_wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_a_missing_device_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--section", "memory"]) == 1
    assert "needs a CUDA device" in capfd.readouterr().err


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--section x: there is no such section; there are memory, emulated"):
        Gpu("x")
