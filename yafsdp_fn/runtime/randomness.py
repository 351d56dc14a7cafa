"""Random numbers that depend on (seed, step, microbatch, visit, rank) and on nothing else.

Each visit runs under a generator seeded with that tuple, so a recomputed forward draws the same numbers, and so does
the plain loop: while `value_and_grad` runs on a plain tree, a counter of visits stands in for the session. Visits on
the pure path (torch.func, a `tree_map` of the parameters) are not counted: they draw from torch's generator.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


def visit_seed(seed: int, step: int, microbatch: int, visit: int, rank: int) -> int:
    """A 63-bit seed; a hash, so that neighbouring visits are unrelated."""
    packed = struct.pack("<5q", seed, step, microbatch, visit, rank)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Runs a visit with the default generators seeded, and puts their states back."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class VisitCounter:
    """Stands in for a session while a plain tree is visited: it only counts."""

    def __init__(self, seed: int, step: int, microbatch: int = 0, rank: int = 0) -> None:
        self._key = (seed, step, microbatch)
        self._rank = rank
        self._visits = {True: 0, False: 0}  # with grad and without, as a session numbers them

    def next_seed(self) -> int:
        with_grad = torch.is_grad_enabled()
        visit = self._visits[with_grad]
        self._visits[with_grad] += 1
        return visit_seed(*self._key, visit, self._rank)


# Only a forward pass in the calling thread reads it, so a context variable is enough: the plain loop has no replay.
plain_visits: ContextVar[VisitCounter | None] = ContextVar("plain_visits", default=None)


@contextmanager
def counting(counter: VisitCounter) -> Iterator[None]:
    token = plain_visits.set(counter)
    try:
        yield
    finally:
        plain_visits.reset(token)
