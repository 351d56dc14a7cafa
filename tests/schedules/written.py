"""What is written down of programs: their events, what these find and leave, and what must not be, as SMT-LIB terms.

W    weights `(unit, version)`, carries, what crosses between stages, how far an optimizer's step is: 16 bits
G    a gradient, as a set: a bit for each contribution of a rank, one for each that is summed over replicas, one
     where anything is in it twice, one where a forward has begun it
"""

from __future__ import annotations

from typing import NamedTuple

from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Op, Trace

STEPS = 2
"""The second begins with what the first has left."""
NOTHING = "#xffff"


class Event(NamedTuple):
    """An op that is issued; None for the end of a backward, and of all. Buffers and streams are those of its stage."""

    op: Op | None
    step: int
    stream: str
    reads: list[Buffer]
    writes: list[Buffer]
    stage: int = 0


class Wrong(NamedTuple):
    """term: true where it happens, at `event`; what: in words."""

    event: int
    what: str
    term: str


class Written:
    """whole: what a stage writes to, together with others. Events are numbered as they are written, stage by stage."""

    def __init__(self, trace: Trace, whole: Written | None = None) -> None:
        self.trace = trace
        self.events: list[Event] = []
        self.found: list[tuple[int, Buffer]] = []  # (event, buffer): the terms r0, r1, ...
        self.left: list[tuple[int, Buffer, str]] = []  # (event, buffer, term)
        self.wrong: list[Wrong] = []
        self.ends: set[int] = set()  # events that are the end of all, on their stages
        self.met: list[str] = []  # of s0, e0, ...: how stages wait for each other, wherever they run
        if whole is not None:
            self.events, self.found, self.left, self.wrong = whole.events, whole.found, whole.left, whole.wrong
            self.ends, trace = whole.ends, whole.trace
        parts = [(c.visit, c.microbatch, u) for c in trace.order for u in trace.visits[c.visit].trained]
        self.visited = {u for c in trace.order if c.kind == "backward" for u in trace.visits[c.visit].trained}
        names = [*dict.fromkeys(parts), *(("leaf", 0, unit) for unit in trace.trained)]
        self.bits = {name: at for at, name in enumerate((step, *name) for step in range(STEPS) for name in names)}
        self.width = 2 * len(self.bits) + 2  # once, once and summed; begun, spoilt

    def gradient(self, *bits: int) -> str:
        return f"(_ bv{sum(1 << bit for bit in set(bits))} {self.width})"

    @property
    def spoilt(self) -> str:
        return self.gradient(self.width - 1)

    def sort(self, buffer: Buffer) -> str:
        return "G" if buffer[0] in ("grad slot", "grad shard") else "W"

    def beginning(self, buffer: Buffer) -> str:
        if buffer[0] == "shard":
            return weights(int(buffer[1]), 0)  # type: ignore[call-overload]
        if buffer[0] == "optimizer":
            return turn(0, 0)
        return self.spoilt if self.sort(buffer) == "G" else NOTHING

    def must(self, event: int, what: str, term: str, value: str) -> None:
        self.wrong.append(Wrong(event, what, f"(distinct {term} {value})"))


def number(value: int) -> str:
    return f"#x{value:04x}"


def weights(unit: int, version: int) -> str:
    return number(unit * (STEPS + 1) + version)


def turn(step: int, at: int) -> str:
    """How far the optimizer's step of a unit is: steps that are over, parts and exchanges since."""
    return number(step * 256 + at)
