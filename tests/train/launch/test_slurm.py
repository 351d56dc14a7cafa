"""The batch script: what it does under commands of ours in place of Slurm's, and a run of it on two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import PContext, SignalException

from tests.harness.pool import Pools
from tests.harness.stalls import until
from tests.train.hosts import INTERFACE, on, two_hosts
from tests.train.inside import flags, inside, lines, text
from train.launch import slurm
from train.machine import ROOT

JOB = "4242"
SCRIPT = ROOT / "train" / "launch" / "run.sbatch"


class Cluster:
    """Commands in a folder that comes first on PATH; each writes down how it was called."""

    def __init__(self, folder: Path, srun: str, hosts: tuple[str, ...] = ("first", "second")) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        step = f"echo $$ > {folder}/step.pid"
        self._write("srun", f"{step}\n{srun}")
        self._write("scontrol", f'[ "$1" = show ] && printf "%s\\n" {" ".join(hosts)}')
        self._write("scancel", f"kill -TERM $(cat {folder}/step.pid)")

    def _write(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self._folder}/calls\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *argv: str, **more: str) -> subprocess.Popen[str]:
        """The batch script, as Slurm starts it on two nodes, with two ranks each."""
        env = os.environ | {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "x[1-2]", "SLURM_CPUS_ON_NODE": "6", **more}
        env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
        env |= {"SLURM_JOB_NUM_NODES": "2", "RANKS": "2", "PYTHON": sys.executable}
        env["PATH"] = f"{self._bin}:{env['PATH']}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", str(SCRIPT), *argv], env=env, cwd=ROOT, **pipes)


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_that_ends_by_itself_is_not_requeued(tmp_path: Path, status: int) -> None:
    cluster = Cluster(tmp_path, f'echo "threads $OMP_NUM_THREADS" "${{@: -1}}"; exit {status}')
    job = cluster.start("clm", "--name", "a b")
    assert "threads 3 a b" in job.communicate(timeout=100)[0]
    assert job.returncode == status
    show, srun = cluster.calls
    assert show == "scontrol show hostnames x[1-2]"
    assert "--rdzv-endpoint=first:24242 --rdzv-id=4242 -m train clm --name a b" in srun
    assert "-m train.launch.slurm --nnodes=2 --nproc-per-node=2 --max-restarts=3" in srun


def test_a_script_takes_the_place_of_a_subcommand(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "exit 0")
    assert cluster.start("own.py", "--steps", "2", RESTARTS="5").wait(100) == 0
    srun = cluster.calls[-1]
    assert srun.endswith(f"--rdzv-id={JOB} own.py --steps 2")
    assert "--max-restarts=5" in srun


@pytest.mark.parametrize(("ends_with", "requeued"), [(1, True), (0, False)])
def test_a_run_that_is_told_to_end_saves_and_is_requeued(tmp_path: Path, ends_with: int, requeued: bool) -> None:
    """Slurm signals the script; ranks take their time. With status 0 the run was over anyway."""
    ready = tmp_path / "ready"
    ranks = f"trap 'sleep 0.3; echo saved; exit {ends_with}' TERM; touch {ready}; while :; do sleep 0.05; done"
    cluster = Cluster(tmp_path, ranks)
    job = cluster.start("clm")
    until(ready.exists)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=100)[0]
    assert job.returncode == ends_with
    assert "saved" in said
    assert f"scancel --signal=TERM {JOB}" in cluster.calls
    assert (f"scontrol requeue {JOB}" in cluster.calls) == requeued == ("told to end" in said)


def test_an_agent_that_is_told_to_end_waits_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch 2.11, too, which knows no such variable: ranks that took 36 seconds to save were killed after 30."""
    waited = list[Any]()
    monkeypatch.setattr(PContext, "close", lambda context, number, timeout: waited.append((number, timeout)))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "270")
    slurm.waits_as_told()
    PContext.close(None)  # a rank has failed, and the others are to begin again
    try:
        raise SignalException("told to end", signal.SIGTERM)
    except SignalException as told:
        PContext.close(None, told.sigval)
    assert waited == [(None, 30), (signal.SIGTERM, 270)]


# ---- two hosts


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    try:
        with two_hosts() as names:
            yield names
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def numbers(folder: Path, name: str) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines(folder, name) if "loss" in row]


@pytest.mark.skipif(
    "HOSTS" not in os.environ, reason="HOSTS=1 trains on two hosts made of namespaces: 23 s of CPU, as root"
)
@pytest.mark.timeout(300)
def test_two_hosts_train_what_four_ranks_here_train(tmp_path: Path, pools: Pools, hosts: tuple[str, str]) -> None:
    text(tmp_path, 100)
    argv = flags(tmp_path, "--model", "debug", "--steps", "4", "--timeout", "100")
    assert [rank.error for rank in pools[4].run(inside, argv)] == [""] * 4
    nodes = " & ".join(f'{on(host)} "${{@:3}}"' for host in hosts)  # behind the two options of srun
    cluster = Cluster(tmp_path, f"{nodes} & wait -n && wait -n", hosts)
    job = cluster.start("clm", *argv, "--name", "two", GLOO_SOCKET_IFNAME=INTERFACE, NCCL_SOCKET_IFNAME=INTERFACE)
    said = job.communicate(timeout=250)[0]
    assert job.returncode == 0, said
    assert numbers(tmp_path, "two") == numbers(tmp_path, "a")
    start = lines(tmp_path, "two", "events.jsonl")[0]
    assert (start["ranks"], start["machines"], start["host"]) == (4, 2, hosts[0])
