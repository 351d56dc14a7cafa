"""`python -m train launch --slurm FILE --nodes M --ranks N SUBCOMMAND ...`: a script that sbatch runs on M machines.

    on each node       torchrun with N ranks; the job's id is the run's, so that a start finds what an earlier one left
    a rank dies        torchrun begins anew on all nodes, from the last checkpoint
    the time is over   or another job comes first: SIGTERM to all ranks, minutes before, which finish a step, save and
                       end; the job is requeued
    a node dies        Slurm requeues the job

Nothing is started here: the script is to be read and changed.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 300
"""Seconds before the time limit at which ranks are told to end."""
RESTARTS = 3
"""Of torchrun, where none are named: with none a run would not look for what an earlier start left."""

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{grace}
# Written by: {command}
#
{estimate}

set -u
cd {folder}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
cores=${{SLURM_CPUS_ON_NODE:-{ranks}}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((cores > {ranks} ? cores / {ranks} : 1))}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}  # seconds in which ranks that were told to end save
{interface}

asked=
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # to the ranks; without a word to this script

# a node that ends does not end the others at once: they may be saving
srun --kill-on-bad-exit=0 --wait={grace} {python} -m torch.distributed.run \\
    --nnodes={nodes} --nproc-per-node={ranks} --max-restarts={restarts} \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \\
    {what} &
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the step
    wait "$step"
    status=$?
done
if [ -n "$asked" ] && [ "$status" -ne 0 ]; then
    echo "told to end: the job is requeued, and goes on from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


class Job(NamedTuple):
    """file: where the script goes; time: as Slurm takes it; cluster: for the estimate; interface: of the network"""

    file: Path
    nodes: int = 1
    time: str = "24:00:00"
    cluster: str = ""
    interface: str = ""


def script(job: Job, ranks: int, restarts: int, command: Sequence[str], estimate: Sequence[str]) -> str:
    """command: a subcommand or a script with its arguments; estimate: lines of text"""
    own = command[0].endswith(".py")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    note = "# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0  # where nodes have several networks"
    return TEMPLATE.format(
        name=job_name(command),
        nodes=job.nodes,
        gpus="" if on_cpu(command) else f"#SBATCH --gpus-per-node={ranks}\n",
        time=job.time,
        grace=GRACE,
        patience=GRACE - 30,
        command=f"python -m train launch {shlex.join(sys.argv[2:])}".replace("\n", " "),
        estimate="\n".join(f"# {line}".rstrip() for line in estimate),
        folder=shlex.quote(os.getcwd()),
        ranks=ranks,
        restarts=restarts or RESTARTS,
        interface=f"export {' '.join(f'{name}={job.interface}' for name in names)}" if job.interface else note,
        python=shlex.quote(sys.executable),
        what=shlex.join([*([] if own else ["-m", "train"]), *command]),
    )


def on_cpu(command: Sequence[str]) -> bool:
    given = " ".join(command).replace("=", " ")
    return "--device cpu" in given


def job_name(command: Sequence[str]) -> str:
    """The run's, where it has one; without what a file's name or a comment had better not hold."""
    given = dict(itertools.pairwise(command))
    return re.sub(r"[^\w.-]", "-", given.get("--name") or Path(command[0]).stem)[:60]


def estimated(job: Job, ranks: int, command: Sequence[str]) -> list[str]:
    """What a step will take on `job.cluster`, in a few lines. Raises ConfigError where it cannot be said."""
    if not job.cluster:
        return ["No estimate of a step: none was asked for (--cluster h100-80g, and clm)."]
    from train.launch.estimate import estimate  # torch, which the launcher otherwise does without

    return estimate(command, job.cluster, ranks * job.nodes)
