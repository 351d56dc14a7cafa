"""Work on files that ends alike on every rank: what fails on one of them is a `CheckpointError` on all, by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.comm.streams import CommunicationError

T = TypeVar("T")
CPU = torch.device("cpu")


class AllRanks:
    """All ranks, as one of them. group: None for the default one; a thread beside the step needs another"""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def first(self, work: Callable[[], T], what: str) -> T:
        """`work()` of rank 0, on every rank: one of them looks at the disk, so that all of them see the same."""
        outcome = [_outcome(work) if self.rank == 0 else None]
        with _talking(what):
            dist.broadcast_object_list(outcome, src=0, group=self.group, device=CPU)
        result: T = _results(outcome, what)[0]
        return result

    def each(self, work: Callable[[], T], what: str) -> list[T]:
        """What `work()` gives on each rank. Every rank works to the end before one of them raises."""
        mine = _outcome(work)
        outcomes: list[Any] = [mine] * self.count
        with _talking(what):
            dist.all_gather_object(outcomes, mine, group=self.group)
        return _results(outcomes, what)

    def through_dcp(self, work: Callable[[], Any], what: str) -> None:
        """`work()` is a call of torch.distributed.checkpoint, which lets every rank know of a failure on one."""
        try:
            with _talking(what), torch.no_grad():
                work()
        except CheckpointException as error:
            causes = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
            raise CheckpointError(f"{what} failed: {'; '.join(causes)}") from error


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # whatever it is, the other ranks wait
        return None, CheckpointError(f"{type(error).__name__}: {error}")


def _results(outcomes: list[Any], what: str) -> list[Any]:
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise type(error)(f"{what}: rank {rank}: {error}")
    return [result for result, _ in outcomes]


@contextmanager
def _talking(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what}: another rank stopped meanwhile: {error}. The checkpoints that were "
            "complete before stay as they were"
        ) from error
