"""Seeds random numbers by (seed, step, microbatch, visit, rank) and nothing else.

While a step runs, every `scan` layer and every `apply` is numbered, on sharded and on plain trees alike, and runs under
generators seeded with that tuple. A recomputed forward draws the same numbers, and so does the plain loop, which stays
a usable oracle. Visits inside a visit (a scan over plain tensors in a block) are numbered anew, from its seed.

Draws of the loss outside its visits are seeded, too, once for each call, by (seed, step, microbatch, rank of the
batch). Every stage calls the whole loss for each of its segments, and all of them draw the same.

Outside a step nothing is seeded.

The same context says over which ranks the collectives of a block act (`communication/axes.py`), also outside a step.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

LOSS, BACKWARD = -1, -2
"""Take the place of a visit's number in the seed of a whole call of the loss, and in that of its backward."""


def visit_seed(seed: int, step: int, microbatch: int, visit: int, rank: int) -> int:
    """Returns a 63-bit seed; a hash, so that neighbouring visits are unrelated."""
    packed = struct.pack("<5q", seed, step, microbatch, visit, rank)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Returns the default generators that a block on `device` draws from."""
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[device.index or 0]


def device_of_leaves(tree: Any) -> torch.device:
    """Returns the device of the first tensor in `tree`, or the CPU."""
    return next((leaf.device for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)), torch.device("cpu"))


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Runs a visit, or a whole call of the loss, with the default generators seeded, and restores their states.

    seed: None leaves them alone

    No effect inside the capture of a CUDA graph: a replay uses the generator's state at that time.
    """
    before = _seed(seed, device)
    try:
        yield
    finally:
        _restore(before)


States = list[tuple[torch.Generator, Tensor]]
"""Generators and their states."""


def states(found: Iterable[torch.Generator]) -> States:
    return [(generator, generator.get_state()) for generator in found]


def _seed(seed: int | None, device: torch.device) -> States:
    """Seeds the default generators; returns them with their states before."""
    before: States = []
    if seed is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return before
    for generator in generators(device):
        before.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    return before


def _restore(before: States) -> None:
    for generator, state in before:
        generator.set_state(state)


@contextmanager
def drawing_from(found: States) -> Iterator[None]:
    """Sets generators to the states `found`, and restores theirs afterwards."""
    now = states(generator for generator, _ in found)
    _restore(found)
    try:
        yield
    finally:
        _restore(now)


class VisitCounter:
    """Numbers the visits of one microbatch, on sharded and on plain trees alike.

    rank: in visits (`Ranks.seed_rank`); batch_rank: beside them, equal for ranks with the same rows; None: as `rank`
    inside: it numbers those inside of one visit, which may run without grad first and with it when it is recomputed
    ranks: those of the state, which collectives in the function act over; None: the function is of plain tensors
    """

    __slots__ = ("_batch_rank", "_inside", "_key", "_rank", "_visits", "ranks")

    def __init__(
        self,
        seed: int,
        step: int,
        microbatch: int = 0,
        rank: int = 0,
        *,
        batch_rank: int | None = None,
        inside: bool = False,
        ranks: Any = None,
    ) -> None:
        self._key = (seed, step, microbatch)
        self._rank = rank
        self._inside = inside
        self.ranks = ranks
        self._batch_rank = rank if batch_rank is None else batch_rank
        self._visits = [0, 0]  # without grad and with it, as a session numbers them

    def next_seed(self) -> int:
        with_grad = self._inside or torch.is_grad_enabled()
        visit = self._visits[with_grad]
        self._visits[with_grad] += 1
        return visit_seed(*self._key, visit, self._rank)

    def seed_beside(self, what: int) -> int:
        """Returns the seed of draws outside visits. what: LOSS or BACKWARD"""
        return visit_seed(*self._key, what, self._batch_rank)


class Unnumbered(NamedTuple):
    """The context of a function outside of a step, where no visit is numbered. ranks: as of a `VisitCounter`"""

    ranks: Any


# One of the library's two context variables (the other: runtime/protocols.py): `scan` over plain tensors has no handle
# to ask, and no collective has. A replay, which may run in autograd's thread, sets it to that of the call.
_counter: ContextVar[VisitCounter | Unnumbered | None] = ContextVar("visit counter", default=None)

_by_thread: dict[int, VisitCounter | Unnumbered | None] = {}
"""Its values now, by thread: one that a block starts has nothing of it."""


def in_step() -> bool:
    """Returns whether a step is running the user's function now."""
    return isinstance(_counter.get(), VisitCounter)


def next_visit_seed() -> int | None:
    """Returns the seed of the visit that begins now; None outside a step, where torch's own generators go on."""
    counter = _counter.get()
    return counter.next_seed() if isinstance(counter, VisitCounter) else None


def _enter(around: VisitCounter | Unnumbered) -> Token[VisitCounter | Unnumbered | None]:
    _by_thread[get_ident()] = around
    return _counter.set(around)


def _leave(token: Token[VisitCounter | Unnumbered | None]) -> None:
    _counter.reset(token)
    _by_thread[get_ident()] = _counter.get()


def ranks_elsewhere() -> list[Any]:
    """Returns the `ranks` that functions act over now in other threads."""
    others = [around for thread, around in list(_by_thread.items()) if thread != get_ident()]
    return [around.ranks for around in others if around is not None and around.ranks is not None]


def ranks_around() -> Any:
    """Returns the `Unnumbered` or counter whose `ranks` collectives act over now; None where nothing has said it."""
    return _counter.get()


@contextmanager
def acting_over(ranks: Any) -> Iterator[None]:
    """Runs a function outside of a step, whose collectives act over `ranks`; a step has said it itself."""
    with nullcontext() if in_step() else counting(Unnumbered(ranks)):
        yield


@contextmanager
def counting(around: VisitCounter | Unnumbered) -> Iterator[None]:
    """Numbers the visits in its context by a counter, or does not number them."""
    token = _enter(around)
    try:
        yield
    finally:
        _leave(token)


T = TypeVar("T")


def run_visit(seed: int, device: torch.device, ranks: Any, function: Callable[..., T], *args: Any) -> T:
    """Returns `function(*args)`, run `seeded`, with visits inside of it numbered from its seed."""
    token = _enter(VisitCounter(seed, 0, inside=True, ranks=ranks))
    before = _seed(seed, device)
    try:
        return function(*args)
    finally:
        _restore(before)
        _leave(token)


def run_plain_visit(device: torch.device, function: Callable[..., T], *args: Any) -> T:
    """Returns `function(*args)`, a visit on plain tensors: in a step under random numbers of its own."""
    counter = _counter.get()
    if not isinstance(counter, VisitCounter):
        return function(*args)
    return run_visit(counter.next_seed(), device, counter.ranks, function, *args)
