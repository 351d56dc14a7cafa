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

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from train.config import MANY, ConfigError, require
from yafsdp_fn.communication.cuda_streams import begin_thread
from yafsdp_fn.communication.groups import MeshRanks
from yafsdp_fn.util.schema import Limits, typed_at
from yafsdp_fn.util.words import counted

Row = dict[str, Tensor]
"""`tokens` and `targets` [S], integers; targets are the tokens that follow, -100 where none counts. Packed rows have
`documents` [S], too: 0, 1, ... in their order."""

Batch = dict[str, Tensor]
"""A rank's part of the rows of a step, [B, S] int64."""

Position = Any
"""A place in the text that JSON can hold: an integer, or where streams are among the rows, a dict."""


Count = Annotated[int, Limits(0, 2**62 - 1)]


def typed_as(kind: Any, value: Any, what: str) -> Any:
    """`value` as a `kind` of `yafsdp_fn.util.schema`: it comes from a checkpoint, and so from other people."""
    try:
        return typed_at(what, kind, value)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def digest_of(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


class Cursor(Protocol):
    """A place in the endless sequence of rows."""

    @property
    def position(self) -> Position:
        """The position of the row that comes next."""
        ...

    def next(self, wanted: bool = True) -> Row | None:
        """Passes a row, and gives it where it is wanted: passing is cheaper."""
        ...


class Rows(Protocol):
    """The rows that a run reads."""

    @property
    def name(self) -> str:
        """The name that errors use."""
        ...

    def cursor(self, position: Position, seed: int) -> Cursor:
        """A cursor from a position on. 0: the beginning. Raises ConfigError for what no cursor of these rows would
        say."""
        ...

    def fingerprint(self) -> str:
        """Changes with what a position means."""
        ...

    def require(self, rows: int, why: str) -> None:
        """Raises ConfigError where there are known to be fewer than `rows`."""
        ...

    def describe(self) -> str:
        """Says how much it is, for people."""
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
        return _Shuffled(self, typed_as(Count, position, "the number of rows passed"), seed)

    def require(self, rows: int, why: str) -> None:
        if self.count < rows:
            raise ConfigError(
                f"{self.name}: {self.describe()}: only {counted(self.count, 'row')}: {why} needs {rows}; "
                "add text, lower --data.seq-len or --data.batch, or hold out another --data.heldout-fraction"
            )


class _Shuffled:
    def __init__(self, rows: Indexed, position: int, seed: int) -> None:
        self.position, self._rows, self._seed = position, rows, seed
        self._epoch = -1
        self._order = torch.empty(0)

    def next(self, wanted: bool = True) -> Row | None:
        epoch, index = divmod(self.position, self._rows.count)
        self.position += 1
        if not wanted:
            return None
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._rows.count, self._seed, epoch)
        return self._rows.row(int(self._order[index]))


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of `count` things, anew for each seed and epoch."""
    # hashed: torch's CPU generator drops all but the low 32 bits of a seed
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(key, "big")))


class Place(NamedTuple):
    """This process's place: among the ranks that the rows of a stage go to, in which stage, among the ranks of
    `context`, which have a part of each row, and among all."""

    rank: int
    ranks: int
    device: torch.device
    stages: int = 1
    context: tuple[int, int] = (0, 1)
    world: tuple[int, int] = (0, 1)

    @property
    def leads(self) -> bool:
        """Tells whether it is the first of all."""
        return self.world[0] == 0

    @property
    def devices(self) -> int:
        """The number of all ranks."""
        return self.world[1]

    def columns(self, row: Tensor) -> Tensor:
        """Its part of a row, as `models.parts.axes.Axes` splits sequences over `context`."""
        rank, ranks = self.context
        parts = row.chunk(2 * ranks)
        return row if ranks == 1 else torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])

    @staticmethod
    def of(mesh: DeviceMesh) -> Place:
        at = MeshRanks(mesh)
        context = (found.rank, found.size) if (found := at.axes.get("context")) else (0, 1)
        world = at.world_rank, at.world
        return Place(at.batch_rank, at.batch_ranks, at.device, at.stages, context, world)


def batches(rows: Rows, position: Position, size: int, place: Place, *, seed: int) -> Iterator[tuple[Batch, Position]]:
    """This rank's part, B = `size` rows, of each step from `position` on, with the position after the step."""
    cursor = rows.cursor(position, seed)
    first = place.rank * size
    while True:
        passed = [cursor.next(first <= i < first + size) for i in range(place.ranks * size)]
        mine = [row for row in passed if row is not None]
        if place.context[1] > 1:
            mine = [{**row, "places": torch.arange(len(row["tokens"]))} for row in mine]
        batch = {key: torch.stack([place.columns(row[key]) for row in mine]).to(place.device).long() for key in mine[0]}
        yield batch, cursor.position


HAND = 4096


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of a hand for each source: those that add up to `HAND` and are nearest to its weight's share."""
    exact = [HAND * weight / sum(weights) for weight in weights]
    counts = [int(each) for each in exact]
    rest = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in rest[: HAND - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise ConfigError(
            f"data.weights {weights[counts.index(0)]} is less than one row in {HAND}: leave that source out"
        )
    return tuple(counts)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Rows of several sources. Each has epochs of its own.

    Which one row p comes from is a function of p and the seed. Positions are dealt with in hands of `HAND`. In each, a
    source gets its share to the nearest row, in an order that is shuffled anew: shares are exact in every hand, and how
    many rows of each came before p takes no counting.
    """

    name: str
    sources: tuple[Rows, ...]
    weights: tuple[float, ...]

    def cursor(self, position: Position, seed: int) -> Cursor:
        return _Dealt(self, position, seed)

    def fingerprint(self) -> str:
        facts = [source.fingerprint() for source in self.sources]
        return digest_of(facts, self.weights)

    def require(self, rows: int, why: str) -> None:
        for source, share in zip(self.sources, shares(self.weights), strict=True):
            source.require(-(-rows * share // HAND), why)

    def describe(self) -> str:
        total = sum(self.weights)
        parts = zip(self.sources, self.weights, strict=True)
        return "; ".join(f"{weight / total:.1%} of {source.describe()}" for source, weight in parts)


class _Dealt:
    def __init__(self, mixed: Mixed, position: Position, seed: int) -> None:
        known = position if isinstance(position, dict) else {"rows": position, "sources": [None] * len(mixed.sources)}
        places: Any = known.get("sources")
        require(isinstance(places, list) and len(places) == len(mixed.sources), "expected a place in each source")
        self._rows = typed_as(Count, known.get("rows"), "the number of rows passed")
        self._shares = shares(mixed.weights)
        self._seed = seed
        hand, within = divmod(self._rows, HAND)
        before = torch.bincount(_order(self._shares, seed, hand)[:within], minlength=len(self._shares)).tolist()
        self._cursors = [
            # a source without a place of its own has passed as many rows as it was dealt
            source.cursor(hand * share + dealt if at is None else at, seed)
            for source, share, dealt, at in zip(mixed.sources, self._shares, before, places, strict=True)
        ]

    @property
    def position(self) -> Position:
        places = [cursor.position for cursor in self._cursors]
        if all(isinstance(place, int) for place in places):
            return self._rows
        return {"rows": self._rows, "sources": [None if isinstance(place, int) else place for place in places]}

    def next(self, wanted: bool = True) -> Row | None:
        hand, within = divmod(self._rows, HAND)
        self._rows += 1
        return self._cursors[int(_order(self._shares, self._seed, hand)[within])].next(wanted)


@lru_cache(maxsize=8)
def _order(shares: tuple[int, ...], seed: int, hand: int) -> Tensor:
    """[HAND]: the source of each row."""
    dealt = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    return dealt[permutation(HAND, seed, -1 - hand)]


def at_most(rows: Rows) -> int:
    """Rows that can be read from the beginning on before one comes a second time; of a stream nobody knows, and many
    are taken."""
    if isinstance(rows, Mixed):
        parts = zip(rows.sources, shares(rows.weights), strict=True)
        return min(at_most(source) * HAND // share for source, share in parts) if rows.sources else 0
    return rows.count if isinstance(rows, Indexed) else MANY


AHEAD = 2
"""Batches made before they are asked for."""


class Reader:
    """The batches from a position on.

    A thread makes the next ones while a step computes.
    """

    def __init__(self, rows: Rows, position: Position, size: int, place: Place, *, seed: int) -> None:
        self.position = position
        """Behind the batches handed out, whatever has been read ahead: what a checkpoint keeps."""
        self._batches = batches(rows, position, size, place, seed=seed)
        # one: batches come in their order
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="reader", initializer=begin_thread, initargs=(place.device,)
        )
        self._ahead: deque[Future[tuple[Batch, Position]]] = deque()
        for _ in range(AHEAD):
            self._submit()

    def _submit(self) -> None:
        self._ahead.append(self._thread.submit(next, self._batches))

    def next(self) -> Batch:
        batch, self.position = self._ahead.popleft().result()
        self._submit()
        return batch

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
