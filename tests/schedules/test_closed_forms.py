"""The closed forms of the builders' docstrings: collectives and bytes on the wire of a regular model, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from tests.program.traces import model, on
from yafsdp_fn.schedules import (
    AllReduce,
    Gather,
    Reduce,
    Schedule,
    Trace,
    UpdateWhen,
    ddp,
    fsdp2,
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


def streamed(L: int, M: int, k: int = 0, prefetch: int = 1) -> tuple[int, int]:
    """Gathers and reductions of ZeRO-3 with k resident layers."""
    gathers = U + L + (2 * M - 1) * max(0, L - k - max(2, prefetch + 1))
    return gathers, M * (L + U)


def once(L: int, M: int) -> tuple[int, int]:
    return L + U, L + U


Form = Callable[[int, int], tuple[int, int]]
FORMS: dict[str, tuple[Callable[..., Schedule], str, Form]] = {
    # factory, mesh, (L, M) -> (gathers, reductions)
    "zero3": (zero3, "ranks", streamed),
    "zero3, deferred": (partial(zero3, defer=True), "ranks", lambda L, M: (streamed(L, M)[0], L + U)),
    **{
        f"zero3, resident {k}, prefetch {p}": (
            partial(zero3, resident=k, prefetch=p),
            "ranks",
            partial(streamed, k=k, prefetch=p),
        )
        for k, p in itertools.product((0, 1, 3), (0, 1, 2, 4))
    },
    "zero2": (zero2, "ranks", lambda L, M: (L + U, M * (L + U))),
    "zero1": (zero1, "ranks", once),
    "fsdp2": (lambda update: fsdp2(), "ranks", lambda L, M: (M * (2 * L + U), M * (L + U))),
    "fsdp2, held": (lambda update: fsdp2(reshard_after_forward=False, defer=True), "ranks", once),
    "fsdp2, deferred": (lambda update: fsdp2(defer=True), "ranks", lambda L, M: ((M + 1) * L + U, L + U)),
    "ddp": (ddp, "replicas of the whole", once),
    "hsdp": (hsdp, "replicas", streamed),
    "hsdp, deferred": (partial(hsdp, defer=True), "replicas", lambda L, M: (streamed(L, M)[0], L + U)),
    "hsdp, prefetch 2": (partial(hsdp, prefetch=2), "replicas", partial(streamed, prefetch=2)),
    **{
        f"hpz {k}, prefetch {p}": (partial(hpz, k, prefetch=p), "replicas and nodes", partial(streamed, prefetch=p))
        for k, p in itertools.product((0, 1, 3, 99), (1, 2))
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("update", ["", "after norm"])
def test_collectives_and_bytes_of_the_docstrings(name: str, update: str) -> None:
    """The next step's first gathers take the place of this step's: with `update` there are as many."""
    factory, mesh, form = FORMS[name]
    for L, M in itertools.product((1, 2, 3, 4, 7), (1, 2, 3)):
        trace = regular(L, M, mesh, update or "never")
        program = verify(factory(update=bool(update))(trace))
        gathers, reductions = form(L, M)
        assert (program.count(Gather), program.count(Reduce)) == (gathers, reductions), (L, M)
        assert program.count(AllReduce) == (L + U if trace.replicas > 1 else 0)
        in_node = program.count(Gather, "node")
        if name.startswith("hpz"):
            k = factory.args[0]
            w = max(2, factory.keywords["prefetch"] + 1)
            assert in_node == M * max(0, min(k, L - w)) + (M - 1) * max(0, min(k, L) - w), (L, M)
            assert set(program.secondary_bytes().values()) <= {B // trace.local_ranks}
        sent, R, P, K = program.wire_bytes(), trace.ranks, trace.replicas, trace.local_ranks
        assert sent["gather"] == (gathers - in_node) * B * (R - 1) // R
        assert sent["gather in node"] == in_node * B * (K - 1) // K
        assert sent["reduce"] == reductions * B * (R - 1) // R
        assert sent["all-reduce"] == program.count(AllReduce) * 2 * (B // R) * (P - 1) // P
