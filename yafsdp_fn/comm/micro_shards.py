"""A mesh on which losses, gradients and parameters have the same bits at every number of ranks.

A global batch is G micro-shards of equal shape, each computed alone. Rank r of R takes every R-th of them:

    rank 0        0     R     2R    ...          microbatch m of rank r is micro-shard g = m R + r,
    rank 1        1     R+1   2R+1  ...          G = R * microbatches
    rank r        r     R+r   2R+r  ...

What is summed is summed in the order of g, one after the other, as one rank does it (ordered_sums.py), or exactly, so
that no order matters (exact_sums.py). What is drawn depends on g, and not on who draws it.
"""

import os
import platform
from typing import Any

import torch

from yafsdp_fn.comm.ranks import Ranks

MICRO_SHARDS = "_yafsdp_micro_shards"  # attribute of a mesh


def mark(mesh: Any, micro_shards: int) -> None:
    """From here on `mesh` is deterministic."""
    setattr(mesh, MICRO_SHARDS, micro_shards)


def micro_shards_of(mesh: Any) -> int | None:
    """Micro-shards of a global batch on `mesh`; None where bits may depend on the number of ranks."""
    found: int | None = getattr(mesh, MICRO_SHARDS, None)
    return found


def microbatches_on(ranks: Ranks | None, given: int | None) -> int:
    """In how many microbatches a call computes its batch: `given`, else 1, or as many as this rank has micro-shards.

    ranks: None for plain tensors. Raises ValueError for another number than that of the micro-shards
    """
    if ranks is None or ranks.micro_shards is None:
        return 1 if given is None else given
    own = ranks.micro_shards // ranks.world
    if given not in (None, own):
        raise ValueError(
            f"microbatches={given}: on this mesh, ya.mesh(deterministic={ranks.micro_shards}) over {ranks.world} "
            f"ranks, each rank computes {own} micro-shards, one after the other; leave microbatches out, or give {own}"
        )
    return own


def drawn_as(ranks: Ranks, microbatch: int, rank: int) -> tuple[int, int]:
    """`(microbatch, rank)` that the random numbers of a rank's micro-shard depend on: as if one rank drew all."""
    return microbatch * ranks.world + rank, 0


def circumstances(device: torch.device) -> dict[str, str]:
    """What bits depend on beside the program and its data, in words."""
    found = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        found |= {
            "GPU": torch.cuda.get_device_name(device),
            "CUDA": str(torch.version.cuda),
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
        }
    return found
