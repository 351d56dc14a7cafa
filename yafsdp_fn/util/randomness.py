"""Seeds random numbers by (seed, step, microbatch, visit, rank) and nothing else; and runs a function again as before.

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
from contextlib import ExitStack, contextmanager, nullcontext
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


def _states(found: Iterable[torch.Generator]) -> States:
    return [(generator, generator.get_state()) for generator in found]


def _seed(seed: int | None, device: torch.device) -> States:
    """Seeds the default generators; returns them with their states before."""
    if seed is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return []
    before = _states(generators(device))
    for generator, _ in before:
        generator.manual_seed(seed)
    return before


def _restore(before: States) -> None:
    for generator, state in before:
        generator.set_state(state)


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


def run_visit(seed: int | None, device: torch.device, function: Callable[..., T], *args: Any) -> T:
    """Returns `function(*args)`, run `seeded`, with visits inside of it numbered from its seed. seed: None outside a
    step"""
    if seed is None:
        return function(*args)
    around = _counter.get()
    return _run_seeded(seed, device, None if around is None else around.ranks, function, *args)


def _run_seeded(seed: int, device: torch.device, ranks: Any, function: Callable[..., T], *args: Any) -> T:
    token = _enter(VisitCounter(seed, 0, inside=True, ranks=ranks))
    before = _seed(seed, device)
    try:
        return function(*args)
    finally:
        _restore(before)
        _leave(token)


# ---- A function that runs again, in a backward or under a transform, draws and casts as it did the first time, and
# its collectives act over the same ranks.


class Replay:
    """Gives every run of a function the random numbers and the autocast of the call, and its ranks.

    seed: reseeds every run; None: uses the default generators, whose states are kept (5 kB on the CPU, 16 bytes on a
    GPU) and restored after a later run
    autocast: (device type, enabled, dtype) of the CPU and of the device when the call was made
    ranks: of the weights of a visit; None: those of the code that makes the call
    """

    def __init__(self, device: torch.device, seed: int | None = None, ranks: Any = None) -> None:
        self._device = device
        self._seed = seed
        around = _counter.get()
        self._ranks = around.ranks if ranks is None and around is not None else ranks
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.autocast = tuple([(x, torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in kinds])
        # without a seed of its own, the number of what is inside
        self._inside = next_visit_seed() if seed is None else None
        self._states: States | None = None

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Returns `function(*args)`."""
        casts = [each for each in self.autocast if each[1] or torch.is_autocast_enabled(each[0])]
        if self._seed is not None and not casts:  # the usual case
            return _run_seeded(self._seed, self._device, self._ranks, function, *args)
        with ExitStack() as stack:
            for device, enabled, dtype in casts:
                # autocast would cache casts by leaf, which is the same tensor in the next step, with other values
                stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype, cache_enabled=False))
            if self._seed is not None:
                return _run_seeded(self._seed, self._device, self._ranks, function, *args)
            around: VisitCounter | Unnumbered = Unnumbered(self._ranks)
            if self._inside is not None:
                around = VisitCounter(self._inside, 0, inside=True, ranks=self._ranks)
            stack.enter_context(counting(around))
            if self._states is None:
                self._states = _states(generators(self._device))
            else:
                stack.enter_context(_drawing_from(self._states))
            return function(*args)


@contextmanager
def _drawing_from(states: States) -> Iterator[None]:
    now = _states(generator for generator, _ in states)
    _restore(states)
    try:
        yield
    finally:
        _restore(now)
