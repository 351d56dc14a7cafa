"""Micro-shards: a mesh on which results have the same bits at every number of ranks; and the local sums it needs."""

import os
import platform
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.communication.ranks import CHUNK, Ranks
from yafsdp_fn.util.on_gpu import vector_kernels

# ---- Sums the contributions of several ranks on one of them, in rank order and in a wide dtype.
#
#     total = rows[0] + rows[1] + ...          # in `dtype`, one after the other, rounded once at the end
#     out = total  or  out + total
#
# On a GPU it is one launch of a Triton kernel, which holds the sum in registers. Elsewhere it works a chunk at a time,
# so the scratch memory is small and constant. A GPU without Triton leaves the order of the rows to torch's kernel, the
# same in every run: the launches do not depend on the number of ranks there, either.


class Scratch:
    """Two chunks per dtype, allocated at first use. Each stream needs its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[torch.dtype, Tensor] = {}

    def chunks(self, dtype: torch.dtype) -> Tensor:
        """[2, chunk]"""
        if dtype not in self._made:
            with torch.inference_mode(False):  # streams run under it, and others could not write to what is made there
                self._made[dtype] = torch.empty(2, CHUNK[self._device.type], dtype=dtype, device=self._device)
        return self._made[dtype]


def local_sum(
    out: Tensor, rows: Tensor, scratch: Scratch, *, add: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Sums `rows` [R, n] in the order of R, in `dtype` or else the wider of both dtypes. The sum is rounded once, to
    the dtype of `out` [n], and written to it or added."""
    dtype = dtype or torch.promote_types(out.dtype, rows.dtype)
    if len(rows) == 1 and not add:
        out.copy_(rows[0])
        return
    if (kernels := vector_kernels(out)) is not None:
        kernels.sum_rows(out, rows, dtype, add, False)
        return
    sums, casts = scratch.chunks(dtype)
    for start in range(0, out.numel(), sums.numel()):
        target = out[start : start + sums.numel()]
        parts = rows[:, start : start + sums.numel()]
        total = target if target.dtype == dtype and not add else sums[: target.numel()]
        cast = casts[: target.numel()]
        if out.device.type == "cuda":
            torch.sum(parts, 0, dtype=dtype, out=total)
        else:
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(_as(part, cast))
        if add and target.dtype.itemsize >= dtype.itemsize:
            target.add_(total)
        elif add:
            target.copy_(total.add_(_as(target, cast)))
        elif total is not target:
            target.copy_(total)


def _as(part: Tensor, cast: Tensor) -> Tensor:
    """Returns `part` in the dtype of `cast`, without allocating: on the CPU a mixed addition would."""
    return part if part.dtype == cast.dtype or part.device.type == "cuda" else cast.copy_(part)


# ---- Deterministic meshes: losses, gradients and parameters have the same bits at every number of ranks.
#
# A global batch is G micro-shards of equal shape, each computed alone. Rank r of R takes every R-th of them (with axes
# inside blocks, all ranks of a row of `batch_ranks` the same, and those of `expert` neighbouring ones together):
#
#     rank 0        0     R     2R    ...          microbatch m of rank r is micro-shard g = m R + r,
#     rank 1        1     R+1   2R+1  ...          G = R * microbatches
#     rank r        r     R+r   2R+r  ...
#
# Sums are made in the order of g, one after the other, as one rank makes them (sums.py), or exactly, so that
# no order matters (util/exact_sums.py). Random numbers depend on g, not on the rank.

MICRO_SHARDS = "_yafsdp_micro_shards"  # attribute of a mesh


def mark(mesh: Any, micro_shards: int) -> None:
    """Makes `mesh` deterministic."""
    setattr(mesh, MICRO_SHARDS, micro_shards)


def micro_shards_of(mesh: Any) -> int | None:
    """Returns the micro-shards of a global batch on `mesh`; None where bits may depend on the number of ranks."""
    found: int | None = getattr(mesh, MICRO_SHARDS, None)
    return found


def microbatches_on(ranks: Ranks | None, given: int | None) -> int:
    """Returns the number of microbatches of a call: `given`, else 1, or this rank's number of micro-shards.

    ranks: None for plain tensors. Raises ValueError if `given` is not the number of micro-shards
    """
    if ranks is None or ranks.micro_shards is None:
        return 1 if given is None else given
    own = ranks.micro_shards // ranks.batch_ranks
    if given not in (None, own):
        raise ValueError(
            f"microbatches={given}: on this mesh, ya.mesh(deterministic={ranks.micro_shards}) over {ranks.world} "
            f"ranks, each rank computes {own} micro-shards, one after the other; leave microbatches out, or give {own}"
        )
    return own


def micro_shard_seed(ranks: Ranks, microbatch: int) -> tuple[int, int]:
    """Returns the `(microbatch, rank)` that seed the random numbers of a micro-shard, as if one rank, or one of each
    part of its sequences, computed all."""
    return microbatch * ranks.batch_ranks + ranks.batch_rank, ranks.seed_rank % ranks.sequence_parts


def circumstances(ranks: Ranks) -> dict[str, str]:
    """Describes everything that bits depend on beside the program and its data."""
    device = ranks.device
    found = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if inside := [f"{name}={axis.size}" for name, axis in ranks.axes.items() if axis.size > 1]:
        found["axes inside blocks"] = ", ".join(inside)
    if device.type == "cuda":
        found |= {
            "GPU": torch.cuda.get_device_name(device),
            "CUDA": str(torch.version.cuda),
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
        }
    return found
