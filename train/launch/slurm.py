"""`python -m train launch --slurm FILE --nodes M --ranks N SUBCOMMAND ...`: a script that sbatch runs on M machines.

    on each node       torchrun with N ranks; the job's id is the run's, so that a start finds what an earlier one left
    a rank dies        torchrun begins anew on all nodes, from the last checkpoint
    the time is over   or another job comes first: SIGTERM to all ranks, minutes before, which finish a step, save and
                       end; the job is requeued
    a node dies        Slurm requeues the job

Nothing is started here: the script is to be read and changed. It runs `python -m train.launch.slurm`, which is torchrun
with an agent that lets ranks save that were told to end.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 300
"""Seconds before the time limit at which ranks are told to end."""
RESTARTS = 3
"""Restarts of torchrun, where none are named: with none a run would not look for what an earlier start left."""

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
srun --kill-on-bad-exit=0 --wait={grace} {python} -m train.launch.slurm \\
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
    """A batch job.

    file: where the script goes; time: as Slurm takes it; cluster: for the estimate; interface: of the network
    """

    file: Path
    nodes: int = 1
    time: str = "24:00:00"
    cluster: str = ""
    interface: str = ""


def script(job: Job, ranks: int, restarts: int, command: Sequence[str], estimate: Sequence[str]) -> str:
    """The batch script of a job. command: a subcommand or a script with its arguments; estimate: lines of text"""
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
    """Tells whether a command asks for the CPU."""
    given = " ".join(command).replace("=", " ")
    return "--device cpu" in given


def job_name(command: Sequence[str]) -> str:
    """The run's, where it has one; without what a file's name or a comment had better not hold."""
    given = dict(itertools.pairwise(command))
    return re.sub(r"[^\w.-]", "-", given.get("--name") or Path(command[0]).stem)[:60]


def estimated(job: Job, ranks: int, command: Sequence[str]) -> list[str]:
    """Lines of text: what a step of `python -m train clm ...` will take on `job.cluster`, from its settings alone.

    Raises ConfigError for another command than clm, settings that cannot work, an unknown cluster.
    """
    if not job.cluster:
        return ["No estimate of a step: none was asked for (--cluster h100-80g, and clm)."]
    import torch  # and what needs it: the launcher otherwise does without

    import models
    import yafsdp_fn as ya
    from train.config import Config, ConfigError, require
    from train.running import run, setup
    from train.running.report import duration

    cluster, ranks = job.cluster, ranks * job.nodes
    require(command[0] == "clm", f"--cluster: a step of clm can be estimated, not of {command[0]}")
    config = run.parse(command[1:], Config, quiet=False)
    vocabulary = setup.vocabulary(config.model, config.vocab, run.tokenizer(config))
    model, sharding = setup.model_config(config.model, vocabulary), config.sharding
    stages = config.stages.stage
    tokens = torch.empty(config.data.usual, config.data.seq_len, dtype=torch.long, device="meta")
    try:
        params = models.of(model).params(model, pin_norms=sharding.pin_norms)
        plan = ya.planner.plan(
            models.of(model).loss(model, chunks=sharding.chunks),
            params,
            {"tokens": tokens, "targets": tokens},
            tx=setup.optimizer(config.optim, config.steps),
            ranks=ranks,
            cluster=cluster,
            precision=setup.precision(sharding),
            schedule=setup.schedule(sharding, config.stages),
            stages=setup.assignment(config, model, params) or 1,
            microbatches=sharding.microbatches,
            replicate=ranks // stages
            if sharding.schedule == "ddp"
            else sharding.replicate
            if sharding.replicate > 1
            else None,
            local=sharding.local or None,
        )
    except ValueError as error:
        raise ConfigError(f"--cluster {cluster}, {ranks} ranks: {error}") from None
    rate = tokens.numel() * (ranks // stages) / plan.step_s
    fits = "fits into" if plan.fits else "does NOT fit into"
    return [
        f"Estimate for {config.model}, {model.num_parameters / 1e6:.1f}M parameters, on {ranks} ranks of {cluster}:",
        f"  a step {plan.step_s * 1e3:.4g} ms, {rate:,.0f} tokens/s, bound by {plan.bound_in_words}",
        f"  {config.steps:,} steps: {duration(plan.step_s * config.steps)}, without evaluations and checkpoints",
        f"  memory {plan.memory.peak_bytes / 2**30:.2f} GiB a rank, {fits} {plan.budget / 2**30:.0f} GiB",
    ]


def waits_as_told() -> None:
    """Has torchrun's agent wait for ranks that were told to end as long as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says: torch
    2.11 does not know that variable, and kills them after 30 seconds."""
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    close, patience = PContext.close, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

    def close_in_time(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        told = isinstance(sys.exception(), SignalException)
        close(context, death_sig, patience if told else timeout)

    PContext.close = close_in_time  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from torch.distributed.run import main

    waits_as_told()
    main()
