"""The command: sections that fail, hang or find no time left lose nothing of the others."""

from __future__ import annotations

import json
import os
import runpy
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from train.bench import main
from train.bench.cuda import command, wanted
from train.bench.cuda.command import BUDGET_S, SECTIONS, Gpu, Section
from train.machine import ROOT

FAULTY = "tests.train.bench.cuda.faulty:run"


def test_a_section_that_fails_keeps_what_it_found_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "gpu.json"
    sections = {"raises": Section(FAULTY, ("raises",), 60), "hangs": Section(FAULTY, ("hangs",), 0.5)}
    found = command.run(Gpu(device="cpu", out=out), sections, "words")
    assert json.loads(out.read_text()) == found
    assert found["command"] == "words" and found["versions"]["torch"] == torch.__version__
    raises, hangs = found["sections"].values()
    assert raises["ended"] == "with status 1" and raises["found"] == {"part": 1, "device": "cpu"}
    assert raises["last lines"][-1] == "RuntimeError: no such luck"
    assert hangs["ended"] == "after its limit of 0 s" and hangs["seconds"] < 30


def test_what_the_budget_has_no_time_for_is_named(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    found = command.run(Gpu(device="cpu", out=out, budget_s=1), {"one": Section(FAULTY, ("hangs",), 60)}, "")
    assert found["sections"]["one"] == {"ended": "skipped", "why": "1 s of the budget were left"}
    assert json.loads(out.read_text()) == found


def test_sections_run_one_by_one_into_one_file(tmp_path: Path) -> None:
    """And a section takes the matrix rate that an earlier command has measured."""
    out, cluster = tmp_path / "gpu.json", {"found": {"cluster": {"matmul_flops": 7.0}}, "ended": "well"}
    sections = {"raises": Section(FAULTY, ("raises",), 60), "two": Section(FAULTY, ("raises",), 60)}
    first = command.run(Gpu(device="cpu", out=out), {"raises": sections["raises"]}, "first")
    one = first["sections"]["raises"]
    assert one["includes"] and one["command"] == "first" and one["date"] == first["date"]
    out.write_text(json.dumps({**first, "sections": {"calibration": cluster, **first["sections"]}}))
    options = Gpu(device="cpu", out=out)
    object.__setattr__(options, "sections", ("two",))
    second = command.run(options, sections, "second")
    assert list(second["sections"]) == ["calibration", "raises", "two"] and second["sections"]["raises"] == one
    assert command.matmul_flops(second) == 7.0 and command.matmul_flops(first) is None
    elsewhere = {**second, "versions": {**second["versions"], "torch": "1.0"}}
    assert command.earlier(out, second) == second["sections"] and command.earlier(out, elsewhere) == {}
    assert command.earlier(tmp_path / "none.json", second) == {}


def test_a_signal_loses_the_section_at_hand_alone(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    hangs = Section(FAULTY, ("hangs",), 60)

    def kill() -> None:
        while not out.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, command.terminated)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(command.Terminated):
            command.run(
                Gpu(device="cpu", out=out),
                {"one": Section(FAULTY, ("raises",), 60), "two": hangs, "3": hangs},
                "",
            )
    finally:
        killer.join()
        signal.signal(signal.SIGTERM, before)
    found = json.loads(out.read_text())["sections"]
    assert found["one"]["found"]["part"] == 1 and found["two"]["ended"] == command.STOPPED and "3" not in found


def test_every_section_says_what_it_includes() -> None:
    for name, section in SECTIONS.items():
        assert len(section.includes) > 300, name


@pytest.mark.parametrize(
    ("argv", "is_wanted"),
    [
        ("--device cuda", True),
        ("--device=cuda --skip-without-device", True),
        ("--device cpu --budget-s 9", True),
        ("--sections order", True),
        ("--device cuda --ranks 1", False),
        ("--device cpu", False),
        ("ablate --out x", False),
        ("", False),
    ],
)
def test_which_of_the_two_benches_is_meant(argv: str, is_wanted: bool) -> None:
    assert wanted(argv.split()) == is_wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--skip-without-device"], 0)])
def test_a_missing_device_is_said(capfd: pytest.CaptureFixture[str], flags: list[str], status: int) -> None:
    assert main(["--device", "cuda", *flags]) == status
    said = capfd.readouterr().err
    assert "this machine has none" in said and ("skipped" in said) == bool(flags)


def test_all_of_gpu_check_ends_within_ten_minutes() -> None:
    found = runpy.run_path(str(ROOT / ".ci" / "gpu_check.py"))
    assert found["LIMIT_S"] + found["GRACE_S"] < 600 and found["LIMIT_S"] > BUDGET_S
    assert found["TESTS_S"] < found["LIMIT_S"] / 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--sections x: there is no such section; there are calibration, one rank"):
        Gpu(sections=("x",))
    assert Gpu().json.parts[-3:] == ("docs", "benchmarks", "gpu.json")
    assert "docs" not in Gpu(device="cpu").json.parts
    with pytest.raises(ValueError, match=r"--budget-s 0: expected a positive number"):
        Gpu(budget_s=0)
