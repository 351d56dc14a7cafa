"""The closed forms of the builders' docstrings: collectives and bytes on the wire of a regular model, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.schedules.traces import model, on
from yafsdp_fn.schedules import (
    AllReduce,
    Gather,
    Reduce,
    Schedule,
    Trace,
    UpdateWhen,
    ddp,
    hpz,
    hsdp,
    verify,
    zero1,
    zero2,
    zero3,
)

B = 960
"""Bytes of every unit below, gathered or reduced: divisible by all ranks of all meshes."""


def regular(L: int, parts: int, mesh: str, updates: UpdateWhen = "never") -> Trace:
    """One stack of L layers and U = 2 other units, all of one size."""
    trace = on(model(L, parts), mesh, updates)
    return trace._replace(units=tuple(u._replace(gather_bytes=B, reduce_bytes=B) for u in trace.units))


U = 2
FORMS: dict[str, tuple[Callable[..., Schedule], str, Callable[[int, int], tuple[int, int]]]] = {
    # factory, mesh, (L, M) -> (gathers, reductions); gathers for L >= 2
    "zero3": (zero3, "ranks", lambda L, M: (U + M * max(L, 2 * L - 2) - 2 * (M - 1), M * (L + U))),
    "zero3, deferred": (
        lambda **o: zero3(defer=True, **o),
        "ranks",
        lambda L, M: (U + M * max(L, 2 * L - 2) - 2 * (M - 1), L + U),
    ),
    "zero2": (zero2, "ranks", lambda L, M: (L + U, M * (L + U))),
    "zero1": (zero1, "ranks", lambda L, M: (L + U, L + U)),
    "ddp": (ddp, "replicas of the whole", lambda L, M: (L + U, L + U)),
    "hsdp": (hsdp, "replicas", lambda L, M: (U + M * max(L, 2 * L - 2) - 2 * (M - 1), M * (L + U))),
    "hpz": (
        lambda **o: hpz(99, **o),
        "replicas and nodes",
        lambda L, M: (U + M * (2 * L - 2) - 2 * (M - 1), M * (L + U)),
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("update", ["", "after norm", "any time"])
def test_collectives_and_bytes_of_the_docstrings(name: str, update: str) -> None:
    """The next step's first gathers take the place of this step's: with `update` there are as many."""
    factory, mesh, form = FORMS[name]
    for L, M in itertools.product((2, 3, 4, 7), (1, 2, 3)):
        trace = regular(L, M, mesh, update or "never")  # type: ignore[arg-type]
        program = verify(factory(update=bool(update))(trace))
        gathers, reductions = form(L, M)
        assert (program.count(Gather), program.count(Reduce)) == (gathers, reductions), (L, M)
        assert program.count(AllReduce) == (L + U if trace.replicas > 1 else 0)
        in_node = program.count(Gather, "node")
        if name == "hpz":
            assert program.count(Gather, "shard") == L + U and in_node == gathers - (L + U)
            assert len(program.secondary_bytes()) <= min(L, in_node)
            assert set(program.secondary_bytes().values()) <= {B // trace.local_ranks}
        sent, R, k, local = program.wire_bytes(), trace.ranks, trace.replicas, trace.local_ranks
        assert sent["gather"] == (gathers - in_node) * B * (R - 1) // R
        assert sent["gather in node"] == in_node * B * (local - 1) // local
        assert sent["reduce"] == reductions * B * (R - 1) // R
        assert sent["all-reduce"] == program.count(AllReduce) * 2 * (B // R) * (k - 1) // k
