"""The model of the links, on a clock that tests move."""

from __future__ import annotations

import random

import pytest

from benchmarks.emulated.lanes import Links
from tests.schedules.cases import SMALL, program
from yafsdp_fn.planner.cluster import CLUSTERS, Phase
from yafsdp_fn.planner.simulate import OpTask, run
from yafsdp_fn.program.ops import Norm


def test_two_groups_share_a_link_evenly() -> None:
    links = Links()
    long = links.submit("a", [Phase("network", 4.0)])
    links.advance(1.0)
    short = links.submit("b", [Phase("network", 1.0)])  # each at half speed: it takes 2 s, in which `long` does 1 of 3
    assert links.next_end() == 3.0
    links.advance(9.0)
    assert short.ended == pytest.approx(3.0)
    assert long.ended == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_simulation_has_the_same_model(seed: int) -> None:
    """Streams without waits are groups that were given all their collectives at once."""
    draw = random.Random(seed)
    anything = program(SMALL["one unit"], "zero3")
    phase = lambda: Phase(draw.choice(("node", "network", "latency")), draw.uniform(0.1, 2.0))  # noqa: E731
    todo = [
        OpTask(
            Norm(()),
            draw.choice(("gather", "reduce", "replicate")),
            (),
            tuple(phase() for _ in range(draw.randrange(4))),
        )
        for _ in range(20)
    ]
    links = Links()
    transfers = [links.submit(task.stream, task.phases) for task in todo]
    links.advance(100.0)
    spans = run(anything, todo, CLUSTERS["a100-80g"], "").spans
    assert [t.ended for t in transfers] == [pytest.approx(span.end) for span in spans]
