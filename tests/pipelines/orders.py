"""Pipelines for tests: a small model on stages, under every order and some ways of sharding."""

from __future__ import annotations

from tests.program.traces import cut, model, on
from yafsdp_fn.pipelines.orders import FACTORIES, V_SHAPED
from yafsdp_fn.schedules import Schedule, Trace, hsdp, zero1, zero2, zero3

ORDERS = tuple(FACTORIES)
SHARDINGS: dict[str, tuple[Schedule | None, str, str]] = {
    "default": (None, "ranks", "never"),
    "once": (zero1(), "ranks", "after norm"),
    "recomputed, updated after norm": (zero2(remat="all", update=True), "ranks", "after norm"),
    "regathered": (zero3(), "ranks", "never"),
    "regathered, reduced once, updated": (zero3(defer=True, update=True, remat="first:1"), "replicas", "after norm"),
    "hybrid": (hsdp(update=True), "replicas", "after norm"),
}


def homes(order: str, stages: int) -> tuple[int, ...]:
    """The stages of segments, as the order wants them."""
    if order in V_SHAPED:
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * (2 if order == "interleaved" else 1)


def whole(order: str, stages: int, microbatches: int, *, mesh: str = "ranks", updates: str = "never") -> Trace:
    """A step of uneven segments, with a skip connection from the first to the last where that is not the next."""
    places = homes(order, stages)
    trace = on(model(2 * len(places) + 1, microbatches), mesh, updates)
    return cut(trace, places, ((0, len(places) - 1),) if len(places) > 2 else ())
