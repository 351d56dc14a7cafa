"""An adversarial interpreter: streams that overlap, in a random order that the scoreboard's waits permit.

An op is not atomic here: it reads when it begins or when it ends, and what it writes is unusable in between. Where two
ops write one buffer at a time, what both write is of no use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from tests.proof.reference import Issued
from tests.proof.symbols import Memory, Result, beginning, outcome
from yafsdp_fn.schedules import Scoreboard, Trace


def waits_of(ops: Sequence[Issued]) -> list[list[int]]:
    """What each op must wait for, as the scoreboard says."""
    board: Scoreboard[int] = Scoreboard()
    return [board.use(key, op.stream, op.reads, op.writes) for key, op in enumerate(ops)]


def without(waits: Sequence[Sequence[int]], pair: tuple[int, int]) -> list[list[int]]:
    """The waits but one: `(later, earlier)`."""
    return [[wait for wait in found if (key, wait) != pair] for key, found in enumerate(waits)]


class OnStream(Protocol):
    """What is issued on a stream."""

    @property
    def stream(self) -> str: ...


def reaches(waits: Sequence[Sequence[int]], ops: Sequence[OnStream], pair: tuple[int, int]) -> bool:
    """Whether the later op of a wait follows the earlier one anyway, by other waits and by the order of streams."""
    later, earlier = pair
    last: dict[str, int] = {}
    before: list[list[int]] = []
    for found, op in zip(without(waits, pair)[: later + 1], ops, strict=False):
        if op.stream in last:
            found.append(last[op.stream])
        last[op.stream] = len(before)
        before.append(found)
    seen = set()
    todo = [later]
    while todo:
        new = [key for key in before[todo.pop()] if key not in seen and key >= earlier]
        seen.update(new)
        todo += new
    return earlier in seen


def run_overlapped(trace: Trace, ops: Sequence[Issued], waits: Sequence[Sequence[int]], rng: random.Random) -> Result:
    """What comes out on overlapping streams; the host issues everything first, even the later steps.

    Raises AssertionError where nothing can go on.
    """
    memory = beginning(trace)
    streams: dict[str, list[int]] = {}
    for key in range(len(ops) - 1, -1, -1):
        streams.setdefault(ops[key].stream, []).append(key)
    speed = {name: rng.choice((1, 20, 400)) for name in streams}
    done: set[int] = set()
    running: dict[str, tuple[int, Memory | None, Memory]] = {}  # what it will write, if it has read; what was there
    while len(done) < len(ops):
        ready = [n for n, keys in streams.items() if n in running or (keys and done.issuperset(waits[keys[-1]]))]
        if not ready:
            raise AssertionError(f"deadlock before {[ops[keys[-1]].op for keys in streams.values() if keys]}")
        (name,) = rng.choices(ready, [speed[n] for n in ready])
        if name not in running:
            key = streams[name].pop()
            written = ops[key].act(memory)
            before = {buffer: memory.get(buffer) for buffer in written}
            running[name] = (key, written if rng.random() < 0.5 else None, before)
            memory.update(dict.fromkeys(written, ("half written by", key)))
        else:
            key, early, before = running.pop(name)
            torn = any(memory[buffer] != ("half written by", key) for buffer in before)
            if early is None:
                memory.update(
                    {buffer: old for buffer, old in before.items() if memory[buffer] == ("half written by", key)}
                )
                early = ops[key].act(memory)
            memory.update(dict.fromkeys(before, ("torn", key)) if torn else early)
            done.add(key)
    return outcome(memory)
