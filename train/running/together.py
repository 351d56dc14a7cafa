"""The ranks of a run as one: they look at rank 0's disk, compare how they were started, and stop together.

result = on_rank_0(work)               # its result, or its error, on every rank
alike(facts)                           # one all-gather; the fields that differ are named, with the ranks on each side
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import yafsdp_fn as ya
from train.config import ConfigError
from train.config_json import flat
from train.settings import Settings
from yafsdp_fn.communication.where import named

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
        raise ya.errors.CommunicationError(f"rank {dist.get_rank()}: {what}: a rank is gone: {error}") from error


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
    """Facts that must be the same on all ranks. texts: {name: fingerprint}"""
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
            found.append(f"{name}: " + ", ".join(f"{text} on {named(ranks)}" for text, ranks in sides.items()))
    if found:
        raise ConfigError("ranks were started differently, and would train different models:\n  " + "\n  ".join(found))


SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEBOUNCE = 1.0


class Stopper:
    """Counts signals while it is entered, and tells all ranks. Enter it on the main thread, after the mesh is made.

    Ctrl-C: the first one asks for a checkpoint and an end at a step boundary, the second one aborts.

        with Stopper() as stop:
            for ...:
                step(...)
                if stop.agreed():        # the same answer on every rank: any rank's signal stops all, at the same step
                    save(); break

    A terminal's Ctrl-C and a launcher that forwards it can both reach a rank, some milliseconds apart: signals within
    `DEBOUNCE` seconds of the first are the same one.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Any = None
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None:
            self._arrive()  # or the process group would be taken down under it

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > DEBOUNCE:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}: aborted without a checkpoint")

    @property
    def requested(self) -> bool:
        """Tells whether this rank was signalled."""
        return self._first is not None

    def agreed(self) -> bool:
        """Tells whether some rank had been signalled by the previous call. Called by all ranks once a step.

        The tiny reduction runs beside the next step, on the CPU, so that no rank waits for another here; the price is
        that a signal takes effect one step later.
        """
        if self._ranks == 1:
            return self.requested
        self._arrive()
        stop = bool(self._flag.item())
        self._flag = torch.tensor(int(self.requested), dtype=torch.int32)
        with talking("beginning the all-reduce of the stop flag"):
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return stop

    def _arrive(self) -> None:
        work = self._work
        self._work = None
        if work is not None:
            with talking("all-reduce of the stop flag between two steps"):
                work.wait()
