"""The lower bound lies below every program that fits, and meets those that are known to be the best."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import yafsdp_fn as ya
from tests.planner.pipelines import NO_LINKS, chain, pipeline
from tests.planner.test_search import CONFIG, SLOW, budgets, traced
from tests.program.traces import MESHES, Mesh
from tests.schedules.strategies import choices, traces
from yafsdp_fn.lab import peers
from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner import Bound, Cluster, Plan, bound, predict_memory, search, simulate
from yafsdp_fn.planner.search import points
from yafsdp_fn.planner.space import arrangements
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.ops import Gather, Update
from yafsdp_fn.program.trace import Encoding, UnitSpec, Visit, chained_order
from yafsdp_fn.schedules import Program, Trace, alternating_slots, build, own_slots, remat, verify, zero1
from yafsdp_fn.timeline.text import shown

ROUNDING = 1 + 1e-9


def clusters(rng: random.Random) -> Cluster:
    """Of every balance of compute, links, latency, contention."""
    return SLOW.replace(
        gpus_per_node=rng.choice([1, 2, 4]),
        matmul_flops=10 ** rng.uniform(10, 14),
        memory_bandwidth=10 ** rng.uniform(9, 13),
        node_bandwidth=10 ** rng.uniform(9, 12),
        network_bandwidth=10 ** rng.uniform(7, 11),
        network_latency=rng.choice([0.0, 1e-5, 1e-3]),
        node_latency=rng.choice([0.0, 1e-6]),
        host_bandwidth=10 ** rng.uniform(7, 11),
        contention=rng.choice([0.0, 0.1, 0.7]),
        unit_overhead=rng.choice([0.0, 1e-4]),
        format_seconds=rng.choice([0.0, 1e-8]),
        host_computes=rng.random() < 0.2,
    )


def expect_below(program: Program, cluster: Cluster, memory: int | None = None) -> Bound:
    """With no more memory than the program itself takes, where that can be predicted."""
    verify(program)
    found = bound(program.trace, cluster, memory)
    seconds = simulate(program, cluster).seconds
    assert found.seconds <= seconds * ROUNDING, (found, seconds)
    assert found.seconds == max(seconds for _, seconds in found.terms) > 0
    return found


@settings(max_examples=60)
@given(traces(), choices(), st.randoms(use_true_random=False))
def test_below_every_builder_on_any_trace(trace: Trace, several: list, rng: random.Random) -> None:
    visits = [
        v._replace(cost=Cost(flops=rng.choice([0, 10**9]), bwd_flops=rng.choice([10**9, 10**10]))) for v in trace.visits
    ]
    visits[0] = visits[0]._replace(cost=Cost(flops=10**8))
    for choice in several:
        on = trace._replace(visits=tuple(visits), mesh=MESHES[choice.mesh], update_when=choice.updates)
        try:
            program = choice.schedule(on)
        except ValueError:  # what the builder refuses
            continue
        local = dict(on.mesh).get("local", rng.choice([1, 2, 4]))
        expect_below(program, clusters(rng).replace(gpus_per_node=local if on.stage_ranks % local == 0 else 64))


def one_visit(sizes: Sequence[int], used: tuple[int, ...], mesh: Mesh) -> Program:
    """ZeRO-1 with updates, of two units of these sizes, some of which the one visit uses."""
    units = tuple(UnitSpec(i, f"w[{i}]", None, 0, n, 4 * n, 4 * n, True) for i, n in enumerate(sizes))
    visits = (Visit(0, "x", used, (), Cost(flops=10**8)),)
    names = ya.Precision().names
    trace = Trace(units, visits, chained_order(visits, 1), mesh, 1, precision=names, update_when="after norm")
    return zero1(update=True)(trace)


def test_a_gather_beside_the_last_updates() -> None:
    """It slows them down, but the step ends with it, not with them: the bound counts one of the two."""
    cluster = SLOW.replace(gpus_per_node=4, contention=0.7, network_latency=1e-1, memory_bandwidth=1e9)
    program = one_visit((1 << 10, 1 << 20), (0,), (("node", 2), ("local", 4)))
    assert [type(op) for op in program.ops[-2:]] == [Gather, Update]
    assert expect_below(program, cluster).seconds == pytest.approx(simulate(program, cluster).seconds)


def test_a_gather_beside_the_update_of_another_unit_of_the_first_visit() -> None:
    program = one_visit((1 << 20, 1 << 20), (0, 1), (("shard", 2),))
    assert [type(op) for op in program.ops[-4:]] == [Update, Gather, Update, Gather]
    expect_below(program, SLOW.replace(gpus_per_node=2, contention=0.0, network_latency=1e-1, memory_bandwidth=1e9))


def written(trace: Trace, rng: random.Random) -> Program:
    """A program that no builder writes: any visits recompute or are offloaded, units share slots as they come."""
    layers = remat.layer_visits(trace)
    some = frozenset(v for v in layers if rng.random() < rng.choice([0.2, 0.8]))
    policy = remat.offload(lambda _: some, ahead=rng.randrange(3)) if rng.random() < 0.3 else lambda _: some
    slots = alternating_slots(trace.visits, trace.units, width=rng.randint(2, 4), resident=rng.randrange(len(layers)))
    loose = {unit.id for unit in trace.units if rng.random() < 0.3}
    slots |= {unit: 100 + unit for unit in loose}
    defer = rng.random() < 0.5
    grads = own_slots(trace.units) if defer else alternating_slots(trace.visits, trace.units)
    return build(trace, slots, grads, prefetch=rng.randrange(4), remat=policy, defer=defer, update=rng.random() < 0.5)


def in_formats(trace: Trace, rng: random.Random) -> Trace:
    """The step with some units that travel in a third of their bytes."""
    units = []
    for unit in trace.units:
        gathered, reduced = (
            Encoding("third", 8, 12, nbytes * 12 // 32) for nbytes in (unit.gather_bytes, unit.reduce_bytes)
        )
        if rng.random() < 0.5:
            unit = unit._replace(gathered_as=gathered)
        if rng.random() < 0.5:
            unit = unit._replace(reduced_as=reduced, sum_bytes=unit.reduce_bytes)
        units.append(unit)
    return trace._replace(units=tuple(units))


@pytest.mark.parametrize(
    ("seed", "formats"), [*((seed, False) for seed in range(40)), *((seed, True) for seed in range(10))]
)
def test_below_programs_that_take_as_much_memory(seed: int, formats: bool) -> None:
    rng = random.Random(seed)
    trace = traced(microbatches=rng.choice([1, 2, 4]))
    trace = in_formats(trace, rng) if formats else trace
    trace = trace.on(rng.choice([mesh for name, mesh in arrangements(trace, SLOW) if name != "ddp"]))
    program = written(trace, rng)
    expect_below(program, clusters(rng).replace(gpus_per_node=4), predict_memory(program).peak_bytes)


@pytest.mark.parametrize("seed", range(16))
def test_below_pipelines_that_take_as_much_memory(seed: int) -> None:
    rng = random.Random(seed)
    trace = traced(microbatches=4)
    # a point comes with the step that it is of
    point, _ = rng.choice([*points(trace, [2, 4], 16, SLOW, 64)])
    point = point._replace(
        remat=rng.randrange(CONFIG.layers + 1), kept=rng.randrange(2) if point.builder != "ddp" else 0
    )
    program = point.program(trace)
    each = [predict_memory(part).peak_bytes for part in program.by_stage]
    expect_below(program, clusters(rng).replace(gpus_per_node=4), max(each))


def test_below_what_search_finds_and_its_peers() -> None:
    trace = traced()
    for budget in budgets(trace).values():
        found = search(trace, SLOW, memory=budget)
        assert 0 < found.least.seconds <= found.best.step_s
        assert f"no program takes less than {shown(found.least.seconds, 4)}" in str(found)
    plan = Plan.of(peers.fsdp2()(trace), SLOW)
    assert plan.least.seconds <= plan.step_s
    assert str(plan.least.against(plan.step_s)) in str(plan)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_it_meets_the_zero_bubble_order(stages: int) -> None:
    """With the memory of as many microbatches as there are stages no order is faster than ZB-H1, whose halves are as
    long as its forwards."""
    trace = with_graphs(chain(stages, 3 * stages), 10**12)
    program = verify(pipeline(trace, stages, orders.zero_bubble(zero1())))
    memory = predict_memory(program).peak_bytes
    seconds = simulate(program, NO_LINKS).seconds
    found = bound(program.trace, NO_LINKS, memory)
    assert seconds == 3 * 3 * stages + stages - 1
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert found.gap(seconds) < 1e-6
    assert dict(found.terms)["fill of stage 0"] == pytest.approx(seconds, rel=1e-6)
    assert bound(program.trace, NO_LINKS, memory // 2).seconds > seconds + 0.4 * stages


def with_graphs(trace: Trace, nbytes: int) -> Trace:
    """With graphs of so many bytes, on a trace whose memory can be predicted."""
    visits = tuple(v._replace(cost=v.cost._replace(inner_bytes=nbytes, between_bytes=nbytes)) for v in trace.visits)
    return trace._replace(visits=visits, precision=ya.Precision().names)


def test_microbatches_that_are_not_in_the_order() -> None:
    """Its bound would be that of three microbatches, its step that of one."""
    trace = traced()._replace(microbatches=3)
    for wrong in (lambda: bound(trace, SLOW), lambda: simulate(zero1()(trace), SLOW)):
        with pytest.raises(ValueError, match=r"says 3 microbatches, its order has computes of 1: .*chained_order"):
            wrong()


def test_less_memory_makes_it_longer() -> None:
    trace = traced(microbatches=2)
    few, middle, ample = budgets(trace).values()
    seconds = [bound(trace, SLOW.replace(network_bandwidth=1e12), memory).seconds for memory in (few, middle, ample)]
    assert seconds[0] >= seconds[1] >= seconds[2] > 0
    nothing = bound(trace, SLOW, 1000)
    assert math.isinf(nothing.seconds)
    assert nothing.against(1.0) == "no program of this step fits into the memory"


def test_a_step_of_one_layer_by_hand() -> None:
    """A gather of 2 s, a forward of 1 and a backward of 2, a reduction of 2: one after the other."""
    trace = chain(1, 1)
    units = tuple(u._replace(gather_bytes=4 * 10**9, reduce_bytes=4 * 10**9) for u in trace.units)
    trace = trace._replace(units=units, mesh=(("shard", 2),))
    cluster = NO_LINKS.replace(network_bandwidth=1e9)
    assert bound(trace, cluster).seconds == simulate(zero1()(trace), cluster).seconds == 7
