"""The launcher: what ranks are told, which status comes back, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.harness.stalls import until
from train import machine
from train.config import ConfigError
from train.launch import command as launch
from train.running.setup import own_device
from yafsdp_fn.api.mesh import _start

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
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
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    env = launch.environment(1, 3, 1234)
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": "1234"}
    assert told.items() <= env.items()
    assert int(env["OMP_NUM_THREADS"]) >= 1
    assert env["GLOO_SOCKET_IFNAME"].startswith("lo")  # what ranks send each other stays on this machine
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.environment(0, 1, 1)["OMP_NUM_THREADS"] == "7"


def test_ranks_do_not_wait_for_libraries_of_the_launcher() -> None:
    code = "import sys, train.launch.command; print({'torch', 'numpy', 'yafsdp_fn'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=machine.ROOT, check=True)
    assert ran.stdout == "set()\n"


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


def test_ranks_may_end_by_themselves() -> None:
    left = processes("import sys; sys.exit(1)", "import time; time.sleep(0.1)")
    assert launch.wait(left, grace=FOREVER) == 1
    assert left[1].returncode == 0


FREEZES = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("place", [0, 1])
def test_a_failure_is_seen_while_an_earlier_rank_lives(place: int) -> None:
    """Nobody waits for a rank that is stopped; a live one has its grace."""
    codes = ["import time; time.sleep(1000)", "import sys; sys.exit(3)"]
    left = processes(*codes[:: 1 - 2 * place])
    began = time.monotonic()
    assert launch.wait(left, grace=0.1) == 3
    assert left[place].returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60


@ON_LINUX
@pytest.mark.parametrize("codes", [(FREEZES, "import sys; sys.exit(3)"), ("import sys; sys.exit(3)", FREEZES, FREEZES)])
def test_ranks_that_are_stopped_are_not_waited_for(codes: tuple[str, ...]) -> None:
    left = processes(*codes)
    assert launch.wait(left, grace=FOREVER) == 3
    assert {process.returncode for process in left} == {3, -signal.SIGKILL}


@ON_LINUX
def test_a_rank_that_is_stopped_where_others_ended_well_has_the_grace_to_be_continued() -> None:
    left = processes(FREEZES, "")
    assert launch.wait(left, grace=0.1) == 128 + signal.SIGKILL
    left = processes(FREEZES, "")

    def go_on() -> None:
        until(lambda: launch.stopped(left[0]))
        left[0].send_signal(signal.SIGCONT)

    again = threading.Thread(target=go_on)
    again.start()
    assert launch.wait(left, grace=FOREVER) == 0
    again.join()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["clm"],
        ["--ranks", "2"],
        ["--ranks", "x", "clm"],
        ["--ranks", "0", "clm"],
        ["--ranks", "2", "--max-restarts", "-1", "clm"],
        ["--ranks", "2", "--more", "1", "clm"],
        ["--ranks", "auto"],
        ["--ranks", "2", "--slurm", "run.sh", "clm"],
        ["--ranks", "2", "tokenizer", "--out", "x"],
    ],
)
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(argv) == 2
    assert "--ranks N SUBCOMMAND" in capsys.readouterr().err


def test_a_subcommand_runs_on_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "launch"]) == 2
    assert capfd.readouterr().err.count("--ranks N is missing") == 2


def test_a_subcommand_that_is_none_starts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "clmm"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "unknown subcommand 'clmm'; did you mean clm?"


def script(folder: Path, text: str) -> str:
    (folder / "my.py").write_text(text)
    return str(folder / "my.py")


SAYS = """
import os, sys
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
os.write(1, f"{rank} of {world}: {sys.argv[1:]}\\n".encode())  # at once: lines of ranks do not mix
"""


def test_an_own_script_runs_on_all_ranks_with_its_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", script(tmp_path, SAYS), "--steps", "3"]) == 0
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == [f"{rank} of 2: ['--steps', '3']" for rank in range(2)]


PIECES = """
import os, sys, time
for line in range(40):
    for piece in [os.environ["RANK"]] * 30 + [chr(10)]:
        os.write(int(sys.argv[1]), piece.encode())
        time.sleep(0.0001)
os.write(int(sys.argv[1]), b"the end")  # of which there is none
"""


@pytest.mark.parametrize("number", [1, 2], ids=["out", "err"])
def test_lines_of_ranks_do_not_mix(tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int) -> None:
    """Though they write at the same time, a piece of a line at a time."""
    assert launch.main(["--ranks", "3", script(tmp_path, PIECES), str(number)]) == 0
    said = capfd.readouterr()[number - 1].splitlines()
    assert sorted(said) == sorted([*(rank * 30 for rank in "012" for _ in range(40)), *["the end"] * 3])


TRACEBACK = """
import os
def several(n):
    return several(n - 1) if n else 1 / 0
several(20)
"""


def test_what_a_rank_writes_at_once_stays_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "3", script(tmp_path, TRACEBACK)]) == 1
    err = capfd.readouterr().err
    lines = err.splitlines()
    assert lines == lines[: len(lines) // 3] * 3 and lines[-1].startswith("ZeroDivisionError"), err


def test_a_launcher_whose_reader_goes_away_ends(tmp_path: Path) -> None:
    endless = script(tmp_path, "while True: print('line')")
    command = [sys.executable, "-m", "train", "launch", "--ranks", "2", endless]
    launcher = subprocess.Popen(command, cwd=machine.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"line\n"
    launcher.stdout.close()
    assert launcher.wait(100) == 1  # BrokenPipeError of a rank


def test_a_script_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--ranks", "2", "nowhere.py"]) == 2
    assert "nowhere.py: no such script" in capsys.readouterr().err


# ---- attempts

ATTEMPTS = """
import os, sys
rank, attempt, most, run_id = (os.environ[name] for name in ('RANK', *(
    f'TORCHELASTIC_{name}' for name in ('RESTART_COUNT', 'MAX_RESTARTS', 'RUN_ID'))))
os.write(1, f'{rank} {attempt} {most} {run_id}\\n'.encode())
sys.exit(int(sys.argv[1]) if rank == '1' and int(attempt) < int(sys.argv[2]) else 0)
"""


@pytest.mark.parametrize(
    ("status", "failures", "restarts", "attempts", "ends"),
    [(3, 2, 5, 3, 0), (3, 9, 1, 2, 3), (3, 9, 0, 1, 3), (launch.CANNOT_WORK, 9, 5, 1, launch.CANNOT_WORK)],
)
def test_all_begin_again_after_one_failed(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    status: int,
    failures: int,
    restarts: int,
    attempts: int,
    ends: int,
) -> None:
    argv = [f"--max-restarts={restarts}", script(tmp_path, ATTEMPTS), str(status), str(failures)]
    assert launch.main(["--ranks", "2", *argv]) == ends
    shown = capfd.readouterr()
    said = [line.split() for line in sorted(shown.out.splitlines())]
    assert [line[:3] for line in said] == [[r, str(a), str(restarts)] for r in "01" for a in range(attempts)]
    assert len({line[3] for line in said}) == 1
    again = [f"launch: a rank ended with status {status}; restart {n + 1} of {restarts}" for n in range(attempts - 1)]
    assert shown.err.splitlines() == again


# ---- whatever happens to the launcher, no rank is left

SLEEPER = """
import os, signal, sys, time
if sys.argv[2] == 'handles':
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()
time.sleep(1000)
"""


Launched = Callable[..., tuple[subprocess.Popen[str], Path]]
"""Starts ranks; gives the launcher and the folder where they write."""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """Starts a launcher of sleepers that each leave a file named by their pid."""
    started: list[subprocess.Popen[str]] = []

    def start(ranks: int, how: str = "") -> tuple[subprocess.Popen[str], Path]:
        pids = tmp_path / "pids"
        pids.mkdir()
        command = [sys.executable, "-m", "train", "launch", "--ranks", str(ranks), "--max-restarts", "2"]
        command += [script(tmp_path, SLEEPER), str(pids), how]
        started.append(subprocess.Popen(command, cwd=machine.ROOT, stderr=subprocess.PIPE, text=True))
        return started[-1], pids

    yield start
    for process in started:
        process.kill()
        process.communicate()


def alive(pids: Path) -> list[int]:
    found = []
    for path in pids.iterdir():
        try:
            state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(int(path.name))
    return found


@ON_LINUX
def test_ranks_do_not_outlive_a_launcher_that_is_killed(launched: Launched) -> None:
    launcher, pids = launched(3)
    until(lambda: len(alive(pids)) == 3)
    launcher.kill()
    until(lambda: not alive(pids))


@pytest.mark.parametrize("ranks", [2, 12])
def test_a_launcher_told_to_end_while_it_starts_leaves_nobody(launched: Launched, ranks: int) -> None:
    launcher, pids = launched(ranks)
    until(lambda: len(list(pids.iterdir())) > 0)  # of twelve, others are being started now
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(100) == 128 + signal.SIGTERM
    assert not alive(pids)
    assert launcher.stderr is not None
    assert "restart" not in launcher.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_the_launcher_alone_is_sent_reaches_every_rank(launched: Launched, number: signal.Signals) -> None:
    launcher, pids = launched(2, "handles")
    until(lambda: len(alive(pids)) == 2)
    os.kill(launcher.pid, number)
    assert launcher.wait(100) == 0
    assert not alive(pids)


@pytest.mark.parametrize(
    ("found", "command", "ranks", "line"),
    [
        (0, ["clm"], 2, "launch: 2 ranks, on the CPU: torch sees no GPU"),
        (1, ["clm"], 1, "launch: 1 rank, one for each GPU"),
        (8, ["clm"], 8, "launch: 8 ranks, one for each GPU"),
        (8, ["clm", "--device", "cpu"], 2, "launch: 2 ranks, on the CPU, as asked"),
    ],
)
def test_as_many_ranks_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: int,
    command: list[str],
    ranks: int,
    line: str,
) -> None:
    monkeypatch.setattr(machine, "DRIVERS", (__file__,) if found else ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found or 3)  # without a driver nobody asks torch
    assert launch.parse(["--ranks", "auto", *command])[0] == ranks
    assert capsys.readouterr().err == line + "\n"
    assert launch.parse(["--ranks", "auto", "--ranks", "3", *command])[0] == 3


def test_make_train_takes_what_is_there() -> None:
    shown = subprocess.run(["make", "-n", "train"], capture_output=True, text=True, cwd=machine.ROOT, check=True).stdout
    assert "launch --ranks auto clm" in shown


def test_ranks_without_a_gpu_of_their_own_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"rank 1 is number 2 on a machine where torch sees 1 GPU, .* start 1 there"):
        _start("cuda", timedelta(seconds=1))
    for device in ("auto", "cuda"):
        monkeypatch.setenv("LOCAL_RANK", "0")  # all ranks, so that none waits for another
        with pytest.raises(ConfigError, match=r"2 ranks on a machine where torch sees 1 GPU, .*--ranks 1, or auto;"):
            own_device(device)
    assert own_device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert own_device("auto") is None
