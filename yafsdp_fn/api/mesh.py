"""ya.mesh: the ranks that share one sharded state, arranged in axes. `util/mesh_axes.py` lists the possible axes."""

import math
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from yafsdp_fn.communication import micro_shards
from yafsdp_fn.communication.agreement import first_difference
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.groups import group_of, host_group, order_launches
from yafsdp_fn.communication.store import answers, rendezvous_store
from yafsdp_fn.util.mesh_axes import EXPERT, INSIDE, REPLICATE, check_inside, mesh_sizes
from yafsdp_fn.util.torch_private import default_group

# ---- The verb.


def mesh(
    *,
    stage: int = 1,
    replicate: int | None = None,
    shard: int = -1,
    local: int | None = None,
    expert: int | None = None,
    context: int | None = None,
    tensor: int | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta | None = None,
    deterministic: int | None = None,
    **axes: int,
) -> DeviceMesh:
    """Makes a mesh over all ranks, and the process group beneath it.

    Under torchrun (`RANK`, `WORLD_SIZE`) it makes the process group if there is none, NCCL on CUDA and gloo on the CPU;
    without torchrun there is one rank. Every rank calls it once, at the start.

    stage: stages of a pipeline: each holds units of its own (`ya.schedules.assign`), on an axis `stage`, which exists
        if this is above 1; the rest describes the ranks of one stage
    replicate: copies of the state, over which gradients are all-reduced, on an axis `replicate`, which exists if this
        is given; -1 for as many as the ranks allow: `replicate=-1, shard=1` is plain data parallelism
    shard: ranks that one copy is cut over; -1 for as many as the ranks allow
    local: ranks of a node, or of any group with fast links, if schedules and reductions are to tell them apart: the
        axis `shard` becomes `node` and `local`. Axes inside blocks are inside of a node, which then has `local` times
        as many ranks as they have
    expert, context, tensor: axes inside blocks, over which a layer itself is computed, its sequences or its experts are
        spread (docs/axes.md); innermost, `tensor` fastest. An axis exists if it is given, also of size 1
    device: "cuda" or "cpu", default cuda if available. A rank takes the GPU numbered LOCAL_RANK; RuntimeError if there
        is none, since ranks do not share one
    timeout: after which a collective whose peers have stopped raises, ten minutes by default
    deterministic: the number of micro-shards in which every global batch is computed, a multiple of the number of
        ranks that rows go to. Losses, norms, gradients and parameters then have the same bits at every number of
        ranks that divides it, with axes inside blocks of one size (docs/deterministic.md). Ranks compare everything
        else that bits depend on, such as their number of threads
    axes: further ones inside blocks, under names of your own, outside of `expert`

    >>> ya.mesh(device="cpu").mesh_dim_names
    ('shard',)
    >>> ya.mesh(replicate=1, shard=-1, device="cpu").mesh_dim_names
    ('replicate', 'shard')
    """
    kind = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu").type
    if kind not in ("cuda", "cpu"):
        raise ValueError("mesh(device=...): expected cuda or cpu, which have collectives here")
    if kind == "cuda" and not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", and this torch was built without CUDA"
        raise RuntimeError(f'mesh(device="cuda"): torch sees no CUDA device{build}; device="cpu" runs on the CPU')
    if kind == "cuda":
        order_launches()
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(f"mesh(timeout={timeout!r}): expected a datetime.timedelta, such as timedelta(minutes=30)")
    limit = timeout or timedelta(minutes=10)
    if not dist.is_initialized():
        _start(kind, limit)
    elif timeout is not None:
        raise ValueError("mesh(timeout=...): the process group exists already; give the timeout to init_process_group")
    asked = {"stage": stage, "replicate": replicate, "shard": shard, "local": local, "device": kind}
    usual = {name: size for name, size in zip(INSIDE, (expert, context, tensor), strict=True) if size is not None}
    inside = {**axes, **usual}
    _agree({**asked, **inside, "deterministic": deterministic})
    check_inside(inside)
    world = dist.get_world_size()
    sizes = mesh_sizes(world, inside, stage=stage, replicate=replicate, shard=shard, local=local)
    if deterministic is not None:
        replicas = sizes.get(REPLICATE, 1)
        ranks = world // (stage * replicas * math.prod(inside.values()))
        _check_deterministic(deterministic, stage, replicas, ranks * inside.get(EXPERT, 1), kind)
    with answers(limit, "making the groups of the mesh"):
        made = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if deterministic is not None:
        micro_shards.mark(made, deterministic)
        communicators(made).must_agree("what bits depend on", micro_shards.circumstances(communicators(made)))
    return made


# ---- The arguments of `mesh`, checked and completed alike on all ranks.


def _agree(arguments: dict[str, object]) -> None:
    """Raises ValueError on every rank unless all ask for the same mesh: making groups would hang."""
    if dist.get_world_size() == 1:
        return
    asked = {f"{name}=": repr(value) for name, value in arguments.items()}
    if (differs := first_difference(asked, group_of(host_group() or default_group()))) is not None:
        raise ValueError(
            f"mesh: ranks ask for different meshes; {differs}\ncall ya.mesh with the same arguments on every rank"
        )


def _check_deterministic(asked: object, stages: int, replicas: int, ranks: int, kind: str) -> None:
    """Raises ValueError unless batches of `asked` micro-shards can be split over `ranks` ranks, whose bits repeat."""
    if type(asked) is not int or asked < 1:
        raise ValueError(
            f"mesh(deterministic={asked!r}): expected the number of micro-shards that every global batch is computed "
            "in, a multiple of every number of ranks that is to give the same bits, such as 12 for 1, 2, 3 and 4"
        )
    if kind == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            f"mesh(deterministic={asked}): on GPUs some of torch's kernels, such as attention's backward, add up in no "
            "fixed order; call torch.use_deterministic_algorithms(True) first, with CUBLAS_WORKSPACE_CONFIG=:4096:8 in "
            "the environment"
        )
    if stages > 1:
        raise ValueError(
            f"mesh(stage={stages}, deterministic={asked}): stages pass microbatches on as their schedule says, and "
            "bits would depend on it; leave stage out, or deterministic"
        )
    if asked % ranks:
        fit = ", ".join(str(number) for number in range(1, asked + 1) if asked % number == 0)
        raise ValueError(
            f"mesh(deterministic={asked}): rows go to {ranks} ranks, and {asked} micro-shards do not divide by "
            f"{ranks}; take {fit} of them, or give a multiple of {ranks}"
        )
    if replicas > 1:
        raise ValueError(
            f"mesh(replicate={replicas}, deterministic={asked}): gradients would be added up in each copy first, and "
            "then over copies, which are other sums than at another number of ranks; leave replicate out"
        )


# ---- The process group, where there is none.

OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""The number of processes that srun, Open MPI's mpirun and others' have started."""


def _start(kind: str, timeout: timedelta) -> None:
    backend = "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo"
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        found = torch.cuda.device_count()
        if local >= found:
            rank = os.environ.get("RANK", 0)
            gpus = f"{found} GPU{'s' * (found > 1)}"
            raise RuntimeError(
                f"mesh: rank {rank} is number {local + 1} on a machine where torch sees {gpus}, and each needs one; "
                f'start {found} there (torchrun --nproc-per-node {found} ...), or take device="cpu"'
            )
        torch.cuda.set_device(local)
    if "WORLD_SIZE" in os.environ:
        with answers(timeout, "meeting the other ranks"):
            dist.init_process_group(backend, timeout=timeout, **rendezvous_store(timeout))
    else:
        for size in OTHER_LAUNCHERS:
            if os.environ.get(size, "1") != "1":
                warnings.warn(
                    f"mesh: by {size} there are several processes, but WORLD_SIZE is not set: each of them trains "
                    "alone, as the only rank of a run. Let each node start torchrun, once, or set RANK, WORLD_SIZE, "
                    "MASTER_ADDR and MASTER_PORT for each process",
                    stacklevel=3,
                )
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
