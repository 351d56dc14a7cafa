"""The collectives of a visit in its trace: found on fake tensors, printed, compared and costed."""

from __future__ import annotations

from typing import Any

import pytest

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64
from tests.harness.pool import Pool
from yafsdp_fn.planner import Cluster
from yafsdp_fn.planner.simulate import LINKS, tasks
from yafsdp_fn.program.trace import Between, Collectives
from yafsdp_fn.schedules import Backward, Forward, Program, Trace, remat, zero3


def traced(_: Any, axes: dict[str, int], of: Options) -> Trace:
    """On fake tensors, from a state."""
    mesh = mesh_of(**axes)
    state = ya.init(params(of), ya.optim.sgd(0.1), mesh=mesh, precision=FLOAT64)
    cut = ya.shard_batch(batch_of(0), mesh, split={"context": 1}, zigzag=of.zigzag)
    return ya.train_step(loss_of(of), ya.optim.sgd(0.1)).trace(state, cut)


def words(calls: Collectives) -> list[str]:
    return [f"{call.kind} {call.axis} {call.nbytes}" for call in calls]


SEQUENCE = Options(sequence_parallel=True)


def test_a_visit_lists_what_its_block_calls(pools: dict[int, Pool]) -> None:
    here, *others = pools[4].run(traced, {"expert": 2, "tensor": 2}, SEQUENCE)
    embed, layer, _, head = here.visits
    assert embed.collectives == embed.adjoints == ()
    # 2 rows of 8 tokens, 16 features in float64; experts take them times 4
    assert words(layer.collectives) == [
        "all_gather tensor 2048",
        "psum_scatter tensor 2048",
        "all_gather tensor 2048",
        "all_to_all expert 8192",
        "all_to_all expert 8192",
        "psum_scatter tensor 2048",
    ]
    assert words(layer.adjoints) == [
        "all_gather tensor 2048",
        "all_to_all expert 8192",
        "all_to_all expert 8192",
        "psum_scatter tensor 2048",
        "all_gather tensor 2048",
        "psum_scatter tensor 2048",
    ]
    assert words(head.collectives) == ["pmax tensor 128", "psum tensor 128", "psum tensor 128"]
    assert words(head.adjoints) == ["psum tensor 128", "psum tensor 128"]  # pmax has none
    (between,) = here.between  # the loss puts positions together before the head
    assert between.after == 2 and words(between.collectives) == ["all_gather tensor 2048"]
    assert words(between.adjoints) == ["psum_scatter tensor 2048"]
    for other in others:
        assert other.between == here.between
        assert [visit[5:] for visit in other.visits] == [visit[5:] for visit in here.visits]


def test_they_are_printed_and_part_of_what_ranks_compare(pools: dict[int, Pool]) -> None:
    here, _ = pools[2].run(traced, {"context": 2}, Options(zigzag=True))
    program = zero3()(here)
    line = "in layers[0] to layers[1]: 2 x ppermute context (2.0 KiB); backward: 2 x ppermute context (2.0 KiB)"
    assert line in str(program).splitlines()
    assert Program.from_json(program.to_json()) == program
    changes: list[tuple[Any, bool]] = []
    for visit in here.visits[1:2]:
        one, two = visit.collectives
        for calls, same in (
            ((one,), False),
            ((one, one, two), False),
            ((one._replace(kind="psum"), two), False),
            ((one._replace(nbytes=1), two), True),  # as batches are
        ):
            changes.append((visit._replace(collectives=calls), same))
    for visit, same in changes:
        other = program.with_trace(here._replace(visits=(here.visits[0], visit, *here.visits[2:])))
        assert (other.fingerprint() == program.fingerprint()) == same
    own = here._replace(between=(Between(-1, here.visits[1].collectives[:1], ()),))
    assert program.with_trace(own).fingerprint() != program.fingerprint()
    wrong = program.with_trace(here._replace(between=(Between(4, (), ()),)))
    with pytest.raises(ValueError, match=r"trace.between\[0\].after: expected -1 or one of the 4 visits, got 4"):
        Program.from_json(wrong.to_json())
    foreign = here.visits[1]._replace(collectives=(here.visits[1].collectives[0]._replace(axis="tensro"),))
    with pytest.raises(ValueError, match=r"trace.visits\[1\]: ppermute over 'tensro' of 2048 bytes; axes are context"):
        Program.from_json(program.with_trace(here._replace(visits=(here.visits[0], foreign))).to_json())


SLOW = Cluster(
    name="slow",
    gpus_per_node=2,
    matmul_flops=1e15,
    attention_flops=1e15,
    memory_bandwidth=1e15,
    memory_bytes=2**40,
    node_bandwidth=1e6,
    network_bandwidth=1e5,
    node_latency=0.0,
    network_latency=0.0,
)
"""Links of which the seconds of a message are all that counts."""


def seconds(program: Program) -> dict[tuple[Any, int], float]:
    """Of each compute on a link, alone."""
    computes = [task for task in tasks(program, SLOW) if isinstance(task.op, Forward | Backward)]
    links = [sum(phase.seconds for phase in task.phases if phase.resource in LINKS) for task in computes]
    return {(type(task.op), task.op.visit): each for task, each in zip(computes, links, strict=True)}


def test_they_cost_what_their_axis_crosses(pools: dict[int, Pool]) -> None:
    """Tensor ranks share a node of two, the two experts do not."""
    here = pools[4].run(traced, {"expert": 2, "tensor": 2}, SEQUENCE)[0]
    ring, exchange = 2048 / 2 / 1e6, 8192 / 2 * 2 / 1e5
    for program, again in ((zero3()(here), 0), (zero3(remat=remat.all)(here), 1)):
        found = seconds(program)
        once = 4 * ring + 2 * exchange
        assert found[Forward, 1] == pytest.approx(once)
        assert found[Forward, 2] == pytest.approx(once + ring)  # with that of the loss after it
        assert found[Backward, 1] == pytest.approx(once * (1 + again))
        assert found[Backward, 2] == pytest.approx(once * (1 + again) + ring)


def test_a_ring_over_nodes(pools: dict[int, Pool]) -> None:
    here = pools[4].run(traced, {"context": 4}, Options(zigzag=True))[0]
    assert seconds(zero3()(here))[Forward, 1] == pytest.approx(6 * 1024 / 1e5)  # one of a node's two leaves it
