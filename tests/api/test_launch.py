"""ya.launch: functions without a name, results, what ranks print, and what is said of those that fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from tests.harness import failing, forked
from tests.harness.stalls import until

ROOT = Path(__file__).resolve().parents[2]

ALONE = "LAUNCH_TESTS_ALONE"
alone = pytest.mark.skipif(ALONE not in os.environ, reason="runs in a process of its own, below")


@pytest.mark.timeout(900)  # of all of them: each has its own
def test_in_a_process_of_its_own() -> None:
    """A fork of a test's worker, which has the threads and groups of all tests before, has ended that worker."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not nightly"]
    status, said = forked.run(
        [*command, "-k", "not process_of_its", __file__], env=os.environ | {ALONE: "1"}, cwd=ROOT, timeout=800
    )
    assert status == 0 and "13 passed" in said, said


def train(rows: torch.Tensor) -> dict[str, Any]:
    mesh = ya.mesh(device="cpu")
    state = failing.state(mesh)
    step = ya.train_step(failing.loss, failing.TX)
    batch = ya.shard_batch({"tokens": rows, "targets": rows.roll(-1, 1)}, mesh)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].detach())
    print(f"rank {mesh.get_rank()} of {mesh.size()}")
    return {"rank": mesh.get_rank(), "losses": torch.stack(losses)}


@alone
def test_two_ranks_train_as_one_does_beside_a_group_that_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    rows = failing.batch()["tokens"]
    alone = ya.launch(train, rows, ranks=1)
    here = ya.mesh(device="cpu")  # its threads are not in a fork
    both = ya.launch(lambda: train(rows), ranks=2)  # a closure
    assert [each["rank"] for each in (*alone, *both)] == [0, 0, 1]
    torch.testing.assert_close(both[0]["losses"], alone[0]["losses"])
    assert torch.equal(both[0]["losses"], both[1]["losses"])
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"]
    assert dist.is_initialized()
    assert here.size() == 1
    assert "RANK" not in os.environ


@alone
def test_a_state_of_the_process_that_launches_is_refused_in_steps() -> None:
    """Each rank would train a copy of its own."""
    state = ya.init({"w": ya.Param((4, 4))}, ya.optim.sgd(0.1), mesh=ya.mesh(device="cpu"))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return ya.apply(lambda w, x: (x @ w["w"]).sum(), params, x)

    step = ya.train_step(loss, ya.optim.sgd(0.1))
    for ranks in (1, 2):
        with pytest.raises(ya.errors.RankFailed, match="Make mesh and state in the launched function"):
            ya.launch(lambda: step(state, torch.ones(2, 4)), ranks=ranks)
    step(state, torch.ones(2, 4))


def one_raises() -> None:
    if ya.mesh(device="cpu").get_rank() == 1:
        raise KeyError("planned")
    dist.all_reduce(torch.ones(1))  # rank 1 will not come


@alone
def test_an_error_of_one_rank_is_shown_once_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["yafsdp_fn.api.launch"], "GRACE", 0.5)
    began = time.monotonic()
    with pytest.raises(ya.errors.RankFailed) as failure:
        ya.launch(one_raises, ranks=2)
    head, *rest = str(failure.value).splitlines()
    assert failure.value.rank == 1
    assert re.fullmatch("rank 1 of 2 raised KeyError; rank 0 (then RuntimeError|was ended)", head)
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "KeyError: 'planned'"
    assert [line.split(",")[0] for line in rest if "File" in line] == [f'  File "{__file__}"']
    assert time.monotonic() - began < 60


def one_waits() -> None:
    rank = ya.mesh(device="cpu").get_rank()
    print(f"process {os.getpid()}", flush=True)
    if rank == 0:
        raise ValueError("planned")
    time.sleep(600)


@alone
def test_a_rank_that_hangs_is_ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["yafsdp_fn.api.launch"], "GRACE", 0.3)
    with pytest.raises(ya.errors.RankFailed, match="rank 0 of 2 raised ValueError; rank 1 was ended"):
        ya.launch(one_waits, ranks=2)
    processes = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def one_is_killed() -> None:
    if ya.mesh(device="cpu").get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


@alone
def test_a_killed_rank_and_what_cannot_be_sent_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["yafsdp_fn.api.launch"], "GRACE", 0.5)
    with pytest.raises(ya.errors.RankFailed, match=r"rank 1 of 2 was lost; rank 0 (then|was) .*\n.*ended by SIGKILL"):
        ya.launch(one_is_killed, ranks=2)
    with pytest.raises(ya.errors.RankFailed, match="rank 0 of 1 was lost\nits process was ended by exit status 0"):
        ya.launch(os._exit, 0, ranks=1)
    others = r"rank [01] (the same|was ended)"
    with pytest.raises(ya.errors.RankFailed, match=rf"raised .*; {others}\nits result, a function, cannot be sent"):
        ya.launch(lambda: lambda: None, ranks=2)


LINES = 50_000
"""More than a pipe holds."""


def print_many() -> int:
    for line in range(LINES):
        print(line)
    return LINES


class Broken:
    """A place to print to that takes one line."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def write(self, text: str) -> None:
        if self.said:
            raise OSError("nobody reads")
        self.said.append(text)

    def flush(self) -> None:
        pass


@alone
def test_ranks_go_on_where_printing_here_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sink := Broken())
    assert ya.launch(print_many, ranks=2) == [LINES, LINES]
    assert sink.said == ["0\n"]


class Late:
    """A place to print to that takes nothing before a rank has ended, and for some time afterwards."""

    def __init__(self, rank: Path) -> None:
        self.said: list[str] = []
        self._rank = rank

    def write(self, text: str) -> None:
        while not self.said and running([self._rank]):
            time.sleep(0.01)
        time.sleep(0 if self.said else 0.5)
        self.said.append(text)

    def flush(self) -> None:
        pass


def running(files: list[Path]) -> list[int]:
    """Returns the processes that are left of those that these files name."""
    return [int(text) for file in files if file.exists() and Path(f"/proc/{(text := file.read_text())}").exists()]


@alone
def test_all_that_ranks_print_is_passed_on_however_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["yafsdp_fn.api.launch"], "GRACE", 0.05)
    monkeypatch.setattr(sys, "stdout", sink := Late(tmp_path / "rank"))

    def speak() -> None:
        (tmp_path / "rank").write_text(str(os.getpid()))
        print("\n".join(map(str, range(1000))), end="")
        holds_the_pipe = subprocess.Popen(["sleep", "600"])
        (tmp_path / "other").write_text(str(holds_the_pipe.pid))

    ya.launch(speak, ranks=1)
    os.kill(int((tmp_path / "other").read_text()), signal.SIGKILL)
    assert "".join(sink.said).split() == list(map(str, range(1000)))


@alone
@pytest.mark.parametrize("second", ["start", "kill", "join"])
def test_no_rank_is_left_by_an_interrupt_anywhere(second: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first comes while ranks run, or wait for those that are not forked yet; the second within a call that starts
    or ends them."""
    files = [tmp_path / "0", tmp_path / "1"]
    forks: list[int] = []

    def wait() -> None:
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(files[int(os.environ["RANK"])])
        while not files[0].exists():
            time.sleep(0.01)
        if second != "start" and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    original = getattr(BaseProcess, second)

    def interrupted(process: BaseProcess, *args: Any) -> None:
        original(process, *args)
        forks.append(process.pid or 0)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, second, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ya.launch(wait, ranks=2)
    finally:
        signal.signal(signal.SIGINT, before)
    left = [*running(files), *(fork for fork in forks if Path(f"/proc/{fork}").exists())]
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert forks
    assert second == "start" or files[0].exists()
    assert not left


@pytest.mark.skipif(ALONE in os.environ, reason="starts a process itself")
def test_a_pipe_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    """`python x.py | head -1`"""
    script = tmp_path / "prints.py"
    script.write_text(
        "import sys, yafsdp_fn as ya\nfrom tests.api.test_launch import print_many\n"
        "print(ya.launch(print_many, ranks=2), file=sys.stderr)\n"
    )
    os.mkfifo(pipe := tmp_path / "pipe")
    said = tmp_path / "said"
    with said.open("w") as errors:
        command = [sys.executable, "-m", "tests.harness.script", str(script)]
        named: Any = SimpleNamespace(name=str(pipe))
        process = forked.Forked(command, env=os.environ, stdout=named, stderr=errors, cwd=ROOT)
        try:
            with pipe.open() as head:
                assert head.readline() == "0\n"
            process.wait(100)
            assert f"[{LINES}, {LINES}]" in said.read_text()
        finally:
            process.kill()


@alone
def test_started_by_torchrun_it_runs_as_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has all of torchrun's environment but the name of its run."""

    def rank() -> tuple[int, int]:
        return ya.mesh(device="cpu").get_rank(), os.getpid()

    def script() -> Any:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        again = ya.launch(lambda: torch.ones(int(os.environ["RANK"])), ranks=2)
        return os.getpid(), ya.launch(rank, ranks=2), [len(each) for each in again]

    (first, one, other), (second, *same) = ya.launch(script, ranks=2)
    assert [one, other] == same
    assert one == [(0, first), (1, second)]
    assert other == [0, 1]
    with pytest.raises(ya.errors.RankFailed, match=r"rank [01] of 2 that torchrun has started: expected ranks=2"):
        ya.launch(lambda: (os.environ.update(TORCHELASTIC_RUN_ID="none"), ya.launch(rank, ranks=3)), ranks=2)


@pytest.mark.nightly
def test_a_script_that_ends_with_launch_is_started_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import yafsdp_fn as ya\nprint('all:', ya.launch(lambda: ya.mesh(device='cpu').get_rank(), ranks=2))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.stdout.splitlines() == ["all: [0, 1]"] * 2, ran.stderr


@alone
def test_what_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = 0
    for wrong in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match="expected the number of ranks"):
            ya.launch(print, ranks=wrong)
    wrong = 3
    with pytest.raises(TypeError, match="expected a function, got int"):
        ya.launch(wrong, ranks=2)
    with pytest.raises(
        ya.errors.RankFailed, match=r"this process is rank [01] of 2 itself: .* left over in the environment"
    ):
        ya.launch(lambda: ya.launch(print, ranks=2), ranks=2)
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ya.errors.RankFailed, match="has asked CUDA for something already"):
        ya.launch(print, ranks=1)


@pytest.mark.nightly
def test_in_a_notebook_cells_functions_run_and_print(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "import yafsdp_fn as ya\nmesh = ya.mesh(device='cpu')",
        "def size():\n    print('here')\n    return ya.mesh(device='cpu').size() + offset\noffset = 10",
        "ya.launch(size, ranks=2)",
        "ya.launch(lambda: 1 / 0, ranks=2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources=where, allow_errors=True).execute()
    said = notebook.cells[2].outputs
    failed = notebook.cells[3].outputs
    assert "".join(out.text for out in said if out.output_type == "stream").split() == ["here"] * 2
    assert [out.data["text/plain"] for out in said if out.output_type == "execute_result"] == ["[12, 12]"]
    (error,) = (out for out in failed if out.output_type == "error")
    assert error.ename == "RankFailed"
    assert "ZeroDivisionError" in error.evalue


@pytest.mark.nightly
def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, time, yafsdp_fn as ya\n"
        "def wait():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "ya.launch(wait, ranks=2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


@alone
def test_no_rank_begins_before_all_are_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a rank's connection makes this process' store do, a thread of it does: a fork meanwhile keeps its locks."""
    module = sys.modules["yafsdp_fn.api.launch"]
    start = module._Rank
    begun = []

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        begun.append(sorted(tmp_path.iterdir()))
        return start(*args)

    monkeypatch.setattr(module, "_Rank", slowly)
    ya.launch(lambda: (tmp_path / os.environ["RANK"]).touch(), ranks=3)
    assert begun == [[], [], []]
    assert len(list(tmp_path.iterdir())) == 3
