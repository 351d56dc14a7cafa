"""Seeds random numbers by (seed, step, microbatch, visit, rank) and nothing else.

While a step runs, every `scan` layer and every `apply` is numbered, on sharded and on plain trees alike, and runs under
generators seeded with that tuple. A recomputed forward draws the same numbers, and so does the plain loop, which stays
a usable oracle. Outside a step nothing is seeded.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import optree
import torch
from torch import Tensor


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
    """Runs a visit with the default generators seeded, and restores their states; None leaves them alone.

    No effect inside the capture of a CUDA graph: a replay uses the generator's state at that time.
    """
    if seed is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        yield
        return
    found = generators(device)
    before = list(map(torch.Generator.get_state, found))
    for generator in found:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(found, before, strict=True):
            generator.set_state(state)


class VisitCounter:
    """Numbers the visits of one microbatch, on sharded and on plain trees alike."""

    def __init__(self, seed: int, step: int, microbatch: int = 0, rank: int = 0) -> None:
        self._key = (seed, step, microbatch)
        self._rank = rank
        self._visits = {True: 0, False: 0}  # with grad and without, as a session numbers them

    def next_seed(self) -> int:
        with_grad = torch.is_grad_enabled()
        visit = self._visits[with_grad]
        self._visits[with_grad] += 1
        return visit_seed(*self._key, visit, self._rank)


# One of the library's two context variables (the other: timeline/record.py): `scan` over plain tensors has no handle
# to ask. Only a forward pass in the calling thread reads it; a replay has its seed already.
_counter: ContextVar[VisitCounter | None] = ContextVar("visit counter", default=None)


def in_step() -> bool:
    """Returns whether a step is running the user's function now."""
    return _counter.get() is not None


def next_visit_seed() -> int | None:
    """Returns the seed of the visit that begins now; None outside a step, where torch's own generators go on."""
    counter = _counter.get()
    return None if counter is None else counter.next_seed()


@contextmanager
def counting(counter: VisitCounter) -> Iterator[None]:
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)
