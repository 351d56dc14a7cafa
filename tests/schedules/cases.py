"""Small traces and programs of every builder, for tests that change them."""

from __future__ import annotations

import os

from tests.program.traces import model, on, together, trace_of, unit
from yafsdp_fn.schedules import Program, Schedule, Trace, ddp, fsdp2, hpz, hsdp, remat, zero1, zero2, zero3

EVERY = os.environ.get("SCHEDULE_MUTANTS") == "all"
"""Searches try all that there is, for hours."""


PAIR = [unit(0, "a"), unit(1, "b")]
MIXED = [unit(0, "a"), unit(1, "frozen", trainable=False)]

SMALL: dict[str, Trace] = {
    "one unit": trace_of([unit(0, "a")], [[0]]),
    "one unit, two visits": trace_of([unit(0, "a")], [[0], [0]]),
    "two units": trace_of(PAIR, [[0], [1]]),
    "two units in one visit": trace_of(PAIR, [[1, 0]]),
    "a unit that is never visited": trace_of(PAIR, [[1]]),
    "a frozen unit first": trace_of(MIXED, [[1], [0]]),
    "tied": trace_of(PAIR, [[0], [1], [0]]),
    "two microbatches": trace_of([unit(0, "a")], [[0]], 2),
}
"""Of up to three visits."""

LARGER: dict[str, Trace] = {
    "one layer": model(1),
    "three layers": model(3),
    "two microbatches of three": model(1, 2),
    "tied embedding": model(2, tied=True),
    "frozen stack": model(2, stacks=2, frozen=True),
    "scanned twice": model(2, twice=True),
    "unrolled": model(3, unroll=2),
    "one scan over two stacks": together(2),
    "interleaved": together(2, alternating=True),
    "forward only": model(3, backward=False),
}


def EVERYTHING(trace: Trace) -> frozenset[int]:
    """A policy: every visit, not only those to layers."""
    return frozenset(visit.id for visit in trace.visits)


SCHEDULES: dict[str, tuple[Schedule, str, str]] = {
    "zero3": (zero3(), "ranks", "never"),
    "zero3 on demand, recomputed": (zero3(prefetch=0, remat=remat.all), "ranks", "never"),
    "zero3 resident": (zero3(resident=1, prefetch=2), "ranks", "after norm"),
    "zero3, deferred": (zero3(defer=True), "ranks", "never"),
    "zero3, update after norm": (zero3(update=True), "ranks", "after norm"),
    "zero3, update in parts": (zero3(update=True), "ranks", "after norm"),
    "zero2": (zero2(remat=remat.first(1)), "ranks", "never"),
    "zero2, update after norm": (zero2(update=True), "ranks", "after norm"),
    "zero1": (zero1(), "ranks", "after norm"),
    "zero1, update after norm": (zero1(update=True), "ranks", "after norm"),
    "ddp": (ddp(), "replicas of the whole", "after norm"),
    "ddp, update after norm": (ddp(update=True), "replicas of the whole", "after norm"),
    "hsdp": (hsdp(), "replicas", "never"),
    "hsdp, update after norm": (hsdp(update=True), "replicas", "after norm"),
    "fsdp2": (fsdp2(), "ranks", "never"),
    "fsdp2, each unit, prefetched": (fsdp2(wrap="all", prefetch=2, remat="all"), "replicas", "after norm"),
    "fsdp2, held, deferred": (fsdp2(reshard_after_forward=False, defer=True), "ranks", "never"),
    "hpz": (hpz(9), "nodes", "never"),
    "hpz, update after norm": (hpz(9, update=True), "replicas and nodes", "after norm"),
    "zero3, offload": (zero3(remat=remat.offload(EVERYTHING, ahead=0)), "ranks", "never"),
    "zero2, offload, update after norm": (zero2(remat=remat.offload(EVERYTHING), update=True), "ranks", "after norm"),
}


def program(trace: Trace, schedule: str) -> Program:
    """The program of `trace` on the mesh and with the optimizer that the schedule is for."""
    build, mesh, updates = SCHEDULES[schedule]
    return build(on(trace, mesh, updates, parts=3 if "in parts" in schedule else 1))
