"""What the ranks of a run do as one: look at rank 0's disk, and make sure that all were started alike.

result = on_rank_0(work)               # its result, or its error, on every rank
alike(facts)                           # one all-gather; the fields that differ are named, with the ranks on each side
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import yafsdp_fn as ya
from train.config import ConfigError, Settings, flat

T = TypeVar("T")

ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ATEN_CPU_CAPABILITY",
    "MKL_CBWR", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
)  # fmt: skip
"""Variables that change what is computed, or how ranks talk. Names of interfaces and numbers of threads may differ."""


@contextlib.contextmanager
def talking(what: str) -> Iterator[None]:
    """Collectives of torch.distributed itself, whose errors are RuntimeErrors, and name neither op nor rank."""
    try:
        yield
    except RuntimeError as error:
        raise ya.CommunicationError(f"rank {dist.get_rank()}: {what}: a rank is gone: {error}") from error


def on_rank_0(work: Callable[[], T], what: str) -> T:
    """`work()` of rank 0, on every rank; what it raises of ConfigErrors, every rank raises."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except ConfigError as error:
            outcome[1] = error
    with talking(what):
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def facts(config: Settings, texts: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all ranks. texts: {name: fingerprint}"""
    return (
        {name: repr(value) for name, value in flat(config).items()}
        | {f"content of the {name}": fingerprint for name, fingerprint in texts.items()}
        | {"torch": torch.__version__, "python": platform.python_version()}
        | {name: repr(os.environ.get(name)) for name in ENVIRONMENT}
    )


def alike(mine: Mapping[str, str]) -> None:
    """Refuses ranks whose facts differ, on all of them."""
    every: list[Mapping[str, str]] = [mine] * dist.get_world_size()
    with talking("comparing how ranks were started"):
        dist.all_gather_object(every, mine)
    found = []
    for name in dict.fromkeys(name for each in every for name in each):
        sides: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            sides.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(sides) > 1:
            found.append(f"{name}: " + ", ".join(f"{text} on rank {_some(ranks)}" for text, ranks in sides.items()))
    if found:
        raise ConfigError("ranks were started differently, and would train different models:\n  " + "\n  ".join(found))


def _some(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
