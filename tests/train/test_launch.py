"""The launcher: what ranks are told, which status comes back, and that nobody is left behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from train import launch


def processes(*codes: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", code]) for code in codes]


def test_ranks_are_told_what_torchrun_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = launch.environment(1, 3, 1234)
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": "1234"}
    assert told.items() <= env.items()
    assert int(env["OMP_NUM_THREADS"]) >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.environment(0, 1, 1)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        (("", ""), 0),
        (("import sys; sys.exit(3)", ""), 3),
        (("", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), 137),
    ],
)
def test_the_first_failure_is_the_status(codes: tuple[str, ...], status: int) -> None:
    assert launch.wait(processes(*codes)) == status


def test_ranks_may_end_by_themselves_and_are_killed_after_the_grace() -> None:
    slow = "import time; time.sleep({})"
    began = time.monotonic()
    assert launch.wait(processes("import sys; sys.exit(1)", slow.format(0.5)), grace=30) == 1
    assert time.monotonic() - began < 25
    left = processes("import sys; sys.exit(1)", slow.format(60))
    assert launch.wait(left, grace=0.1) == 1
    assert left[1].returncode == -9


@pytest.mark.parametrize("argv", [[], ["clm"], ["--ranks", "2"], ["--ranks", "x", "clm"], ["--ranks", "0", "clm"]])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(argv) == 2
    assert "--ranks N SUBCOMMAND" in capsys.readouterr().err


def test_a_subcommand_runs_on_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "fly"]) == 2
    assert capfd.readouterr().err.count("unknown subcommand 'fly'") == 2
