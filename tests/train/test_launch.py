"""The launcher: what ranks are told, which status comes back, and that nobody is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from train import launch

FOREVER = 10**6
"""Seconds that no test waits."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A launcher keeps its handlers of signals until it ends, and here it is the test's process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
    left = processes("import sys; sys.exit(1)", slow.format(0.5))
    assert launch.wait(left, grace=FOREVER) == 1
    assert left[1].returncode == 0
    left = processes("import sys; sys.exit(1)", slow.format(FOREVER))
    assert launch.wait(left, grace=0.1) == 1
    assert left[1].returncode == -signal.SIGKILL


@pytest.mark.parametrize("argv", [[], ["clm"], ["--ranks", "2"], ["--ranks", "x", "clm"], ["--ranks", "0", "clm"]])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(argv) == 2
    assert "--ranks N SUBCOMMAND" in capsys.readouterr().err


def test_a_subcommand_runs_on_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "fly"]) == 2
    assert capfd.readouterr().err.count("unknown subcommand 'fly'") == 2


def test_an_own_script_runs_on_all_ranks_with_its_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "my.py"
    script.write_text(
        "import os, sys\n"
        "rank, world = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "os.write(1, f'{rank} of {world}: {sys.argv[1:]}\\n'.encode())"  # at once: lines of ranks do not mix
    )
    assert launch.main(["--ranks", "2", str(script), "--steps", "3"]) == 0
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == [f"{rank} of 2: ['--steps', '3']" for rank in range(2)]


def test_a_script_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "nowhere.py"]) == 2
    assert "nowhere.py: no such script" in capsys.readouterr().err
