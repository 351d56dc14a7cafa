"""The event loop: streams in order, waits, transfers that need both ends, rates, and events that never begin."""

from __future__ import annotations

from collections.abc import Sequence

from yafsdp_fn.program.events import EventTime, StageEvent, play


def alone(seconds: float) -> tuple[tuple[str, float], ...]:
    return (("link", seconds),)


def test_a_stream_runs_in_order_and_others_beside_it() -> None:
    todo = [
        StageEvent(0, "compute", (), alone(2)),
        StageEvent(0, "compute", (), alone(1)),
        StageEvent(0, "gather", (), alone(5)),
        StageEvent(0, "reduce", (0, 1), alone(1)),
    ]
    assert play(todo) == [EventTime(0, 2, None), EventTime(2, 3, 0), EventTime(0, 5, None), EventTime(3, 4, 1)]


def test_a_transfer_begins_when_both_ends_have_come_to_it() -> None:
    todo = [
        StageEvent(0, "compute", (), alone(2)),
        StageEvent(0, "send", (0,), alone(1), partner=3),
        StageEvent(1, "compute", (), alone(4)),
        StageEvent(1, "receive", (2,), alone(1), partner=1),
    ]
    assert play(todo)[1] == play(todo)[3] == EventTime(4, 5, 2)


def test_what_waits_for_itself_or_for_each_other_never_begins() -> None:
    """Two stages that send before they receive, and one that has no part in it."""
    todo = [
        StageEvent(0, "send", (3,), partner=2),
        StageEvent(0, "receive", (), partner=1),
        StageEvent(1, "receive", (1,), partner=0),
        StageEvent(1, "compute", (1,)),
        StageEvent(1, "send", (2,), partner=1),
        StageEvent(2, "compute", (), alone(1)),
        StageEvent(2, "compute", (6,)),
    ]
    todo[1] = todo[1]._replace(partner=4)
    assert [at is not None for at in play(todo)] == [False, False, False, False, False, True, False]


def test_rates_follow_what_runs_beside() -> None:
    def shared(resource: str, computes: bool, beside: Sequence[str]) -> float:
        return 1.0 / beside.count(resource)

    todo = [StageEvent(0, "gather", (), alone(1)), StageEvent(0, "reduce", (), (*alone(2), ("latency", 1.0)))]
    assert play(todo, shared) == [EventTime(0, 2, None), EventTime(0, 4, None)]
