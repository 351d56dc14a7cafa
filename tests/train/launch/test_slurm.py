"""The batch script: what it says, what it does under commands of ours in place of Slurm's, a run of it on two hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import PContext, SignalException

from tests.harness.pool import Pool
from tests.harness.stalls import until
from tests.train.hosts import INTERFACE, on, two_hosts
from tests.train.inside import flags, inside, text
from train.launch import command as launch
from train.launch import slurm

JOB = "4242"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["train", "launch", "..."])
    return tmp_path


def written(folder: Path, *argv: str) -> str:
    file = folder / "run.sh"
    assert launch.main(["--slurm", str(file), *argv]) == 0
    subprocess.run(["bash", "-n", str(file)], check=True)
    return file.read_text()


def test_the_script_says_what_was_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--nodes", "3", "--ranks=8", "--time", "2:30:00", "--interface", "ib0", "--max-restarts", "5")
    script = written(folder, *argv, "clm", "--name", "it's mine", "--data.files", "a b/*.txt")
    assert f"sbatch {folder / 'run.sh'}" in capsys.readouterr().out
    for line in (
        "#SBATCH --job-name=it-s-mine",
        "#SBATCH --nodes=3",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=2:30:00",
        "#SBATCH --requeue",
        "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0",
        f"cd {os.getcwd()}",
        "    --nnodes=3 --nproc-per-node=8 --max-restarts=5 \\",
        "# No estimate of a step: none was asked for (--cluster h100-80g, and clm).",
    ):
        assert line in script.splitlines()
    assert """-m train clm --name 'it'"'"'s mine' --data.files 'a b/*.txt' &""" in script
    assert "gpus" not in written(folder, "--ranks", "2", "clm", "--device", "cpu")


def test_the_estimate_is_the_planners(folder: Path) -> None:
    import torch

    import yafsdp_fn as ya
    from models import llama
    from train.config import Config
    from train.running import setup

    settings = ("--data.batch", "2", "--data.seq-len", "64", "--sharding.schedule", "zero2")
    script = written(folder, "--nodes", "2", "--ranks", "8", "--cluster", "a100-80g", "clm", *settings)
    tokens, config = torch.empty(2, 64, dtype=torch.long, device="meta"), Config()
    model, tx = llama.CONFIGS["debug"], setup.optimizer(config.optim, config.steps)
    batch, schedule = {"tokens": tokens, "targets": tokens}, ya.schedules.zero2()
    cluster: Any = {"ranks": 16, "cluster": "a100-80g"}
    plan = ya.planner.plan(llama.loss(model), llama.params(model), batch, tx=tx, schedule=schedule, **cluster)
    assert f"a step {plan.step_s * 1e3:.4g} ms, {2 * 64 * 16 / plan.step_s:,.0f} tokens/s" in script


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--nodes", "2", "--ranks", "2", "clm"), "--nodes: of --slurm"),
        (("--cluster", "a100-80g", "--ranks", "2", "clm"), "--cluster: of --slurm"),
        (("--slurm", "x.sh", "--time", "soon", "--ranks", "2", "clm"), "--time is 'soon'"),
        (("--slurm", "x.sh", "--interface", "a b; rm", "--ranks", "2", "clm"), "--interface is 'a b; rm'"),
        (("--slurm", "/nowhere/x.sh", "--ranks", "2", "clm"), "No such file or directory: '/nowhere/x.sh'"),
        (("--slurm", "x.sh", "--cluster", "a1", "--ranks", "2", "clm"), "--cluster a1, 2 ranks: unknown cluster 'a1'"),
        (("--slurm", "x.sh", "--cluster", "a100-80g", "--ranks", "2", "sft"), "a step of clm can be estimated"),
    ],
)
def test_what_cannot_be_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: Any, says: str
) -> None:
    monkeypatch.chdir(folder)
    assert launch.main(argv) == 2
    assert says in capsys.readouterr().err
    assert list(folder.iterdir()) == []


# ---- run, under commands of ours in place of Slurm's


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
        self.script = folder / "run.sh"

    def _write(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self._folder}/calls\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def start(self) -> subprocess.Popen[str]:
        env = os.environ | {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "x[1-2]", "SLURM_CPUS_ON_NODE": "6"}
        env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
        env["PATH"] = f"{self._bin}:{env['PATH']}"
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", str(self.script)], env=env, **pipes)


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_that_ends_by_itself_is_not_requeued(folder: Path, status: int) -> None:
    cluster = Cluster(folder, f'echo "threads $OMP_NUM_THREADS"; exit {status}')
    written(folder, "--nodes", "2", "--ranks", "2", "clm", "--name", "a b")
    job = cluster.start()
    assert "threads 3" in job.communicate(timeout=100)[0] and job.returncode == status
    show, srun = cluster.calls
    assert show == "scontrol show hostnames x[1-2]"
    assert "--rdzv-endpoint=first:24242 --rdzv-id=4242 -m train clm --name a b" in srun
    assert "-m train.launch.slurm --nnodes=2 --nproc-per-node=2 --max-restarts=3" in srun


@pytest.mark.parametrize(("ends_with", "requeued"), [(1, True), (0, False)])
def test_a_run_that_is_told_to_end_saves_and_is_requeued(folder: Path, ends_with: int, requeued: bool) -> None:
    """Slurm signals the script; ranks take their time. With status 0 the run was over anyway."""
    ready = folder / "ready"
    ranks = f"trap 'sleep 0.3; echo saved; exit {ends_with}' TERM; touch {ready}; while :; do sleep 0.05; done"
    cluster = Cluster(folder, ranks)
    written(folder, "--nodes", "2", "--ranks", "2", "clm")
    job = cluster.start()
    until(ready.exists)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=100)[0]
    assert job.returncode == ends_with and "saved" in said
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


def losses(run: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.skipif(
    "HOSTS" not in os.environ, reason="HOSTS=1 trains on two hosts made of namespaces: 23 s of CPU, as root"
)
@pytest.mark.timeout(300)
def test_two_hosts_train_what_four_ranks_here_train(
    folder: Path, pools: dict[int, Pool], hosts: tuple[str, str]
) -> None:
    text(folder, 100)
    argv = flags(folder, "--model", "debug", "--steps", "4", "--timeout", "100")
    assert [rank.error for rank in pools[4].run(inside, argv)] == [""] * 4
    nodes = " & ".join(f'{on(host)} "${{@:3}}"' for host in hosts)  # behind the two options of srun
    cluster = Cluster(folder, f"{nodes} & wait -n && wait -n", hosts)
    written(folder, "--nodes", "2", "--ranks", "2", "--interface", INTERFACE, "clm", *argv, "--name", "two")
    job = cluster.start()
    said = job.communicate(timeout=250)[0]
    assert job.returncode == 0, said
    assert losses(folder / "runs" / "two") == losses(folder / "runs" / "a")
    events = [json.loads(line) for line in (folder / "runs" / "two" / "events.jsonl").read_text().splitlines()]
    assert (events[0]["ranks"], events[0]["machines"], events[0]["host"]) == (4, 2, hosts[0])
