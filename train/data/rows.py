"""Rows of S tokens, one after the other without an end: what a step reads is a function of a position.

    cursor = rows.cursor(position, seed)
    for each step:
        batch = [cursor.next() for _ in range(R * B)][r * B : (r + 1) * B]          # of rank r
        position = cursor.position                                                 # what a checkpoint keeps

Every rank goes through the same rows and makes only its own, so a position is the same on all of them, and means the
same at every number of ranks.

Of rows that have numbers (`Indexed`) the position counts those passed: row p of an endless sequence is
`row(permutation(seed, p // count)[p % count])`, shuffled anew in each epoch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from train.config import ConfigError
from yafsdp_fn.comm.grid import grid

Row = dict[str, Tensor]
"""`tokens` and `targets` [S], integers; targets are the tokens that follow, -100 where none counts. Packed rows have
`documents` [S], too: 0, 1, ... in their order."""

Batch = dict[str, Tensor]
"""A rank's part of the rows of a step, [B, S] int64."""

Position = Any
"""What JSON can hold: an integer, or where streams are among the rows, a dict."""


class Cursor(Protocol):
    """A place in the endless sequence of rows."""

    @property
    def position(self) -> Position:
        """Of the row that comes next."""
        ...

    def next(self, wanted: bool = True) -> Row | None:
        """Passes a row, and gives it where it is wanted: passing is cheaper."""
        ...


class Rows(Protocol):
    """What a run reads."""

    @property
    def name(self) -> str:
        """As errors call it."""
        ...

    def cursor(self, position: Position, seed: int) -> Cursor:
        """From a position on. 0: the beginning."""
        ...

    def fingerprint(self) -> str:
        """Changes with what a position means."""
        ...

    def require(self, rows: int, why: str) -> None:
        """Raises ConfigError where there are known to be fewer than `rows`."""
        ...

    def describe(self) -> str:
        """How much it is, for people."""
        ...


class Indexed(ABC):
    """Rows that have numbers. Subclasses are frozen, with a `name`."""

    name: str

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows of an epoch."""

    @abstractmethod
    def row(self, index: int) -> Row: ...

    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def describe(self) -> str: ...

    def cursor(self, position: Position, seed: int) -> Cursor:
        return _Shuffled(self, int(position), seed)

    def require(self, rows: int, why: str) -> None:
        if self.count < rows:
            raise ConfigError(
                f"{self.name}: {self.describe()}: {self.count} rows are too few: {why} needs {rows}; "
                "add text, or lower --data.seq-len or --data.batch"
            )


class _Shuffled:
    def __init__(self, rows: Indexed, position: int, seed: int) -> None:
        self.position, self._rows, self._seed = position, rows, seed
        self._epoch, self._order = -1, torch.empty(0)

    def next(self, wanted: bool = True) -> Row | None:
        epoch, index = divmod(self.position, self._rows.count)
        self.position += 1
        if not wanted:
            return None
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._rows.count, self._seed, epoch)
        return self._rows.row(int(self._order[index]))


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """Of `count` things, anew for each seed and epoch."""
    # hashed: torch's CPU generator drops all but the low 32 bits of a seed
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(key, "big")))


class Place(NamedTuple):
    """Where this process stands: among the ranks of its stage, to which rows are dealt, and in which stage."""

    rank: int
    ranks: int
    device: torch.device
    stage: int = 0
    stages: int = 1

    @property
    def leads(self) -> bool:
        """Whether it is the first of all."""
        return self.rank == 0 and self.stage == 0

    @property
    def devices(self) -> int:
        """How many there are, over all stages."""
        return self.ranks * self.stages

    @staticmethod
    def of(mesh: DeviceMesh) -> Place:
        cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        at = grid(mesh)
        return Place(at.batch_rank, at.batch_ranks, device, at.stage, at.ranks.shape[0])


def batches(rows: Rows, position: Position, size: int, place: Place, *, seed: int) -> Iterator[tuple[Batch, Position]]:
    """This rank's part, B = `size` rows, of each step from `position` on, with the position after the step."""
    cursor = rows.cursor(position, seed)
    first = place.rank * size
    while True:
        passed = [cursor.next(first <= i < first + size) for i in range(place.ranks * size)]
        mine = [row for row in passed if row is not None]
        batch = {key: torch.stack([row[key] for row in mine]).to(place.device).long() for key in mine[0]}
        yield batch, cursor.position
