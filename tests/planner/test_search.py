"""The search finds what trying everything finds, fits, and says what does not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from models.parts.axes import Axes
from tests.harness.abstract import step_of
from yafsdp_fn.planner import CLUSTERS, Cluster, DoesNotFit, Found, Plan, plan, predict_memory, search, simulate
from yafsdp_fn.planner.cluster import CollectiveRanks
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.planner.plan import axes
from yafsdp_fn.planner.search import Sweep
from yafsdp_fn.planner.space import Point, arrangements
from yafsdp_fn.planner.trace import trace as abstract_trace
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.schedules import Gather, Trace, hsdp, one_f_one_b, verify, zero3

CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=6)
TX = ya.optim.adamw(1e-3)
MIXED = ya.Precision(compute=torch.bfloat16)
SLOW = CLUSTERS["a100-80g"].replace(
    name="slow",
    gpus_per_node=4,
    matmul_flops=1e12,
    attention_flops=1e12,
    network_bandwidth=1e9,
    network_latency=1e-5,
)
"""A network so slow that the debug model is bound by communication."""
FAST = SLOW.replace(network_bandwidth=1e11, network_latency=0.0)


@functools.cache
def traced(ranks: int = 16, microbatches: int = 1, precision: ya.Precision = MIXED) -> Trace:
    return abstract_trace(*step_of(CONFIG), ranks=ranks, precision=precision, microbatches=microbatches, tx=TX)


def needs(trace: Trace, point: Point) -> int:
    return predict_memory(point.program(trace)).peak_bytes


def budgets(trace: Trace) -> dict[str, int]:
    """From what zero3 takes when everything recomputes to what it takes when everything stays."""
    mesh = trace.mesh
    least = needs(trace, Point("zero3", mesh, remat=CONFIG.layers))
    most = needs(trace, Point("zero3", mesh, kept=CONFIG.layers))
    return {"tight": least + (most - least) // 10, "middle": (least + most) // 2, "ample": 4 * most}


@pytest.mark.sampled
@pytest.mark.parametrize("budget", ["tight", "middle", "ample"])
@pytest.mark.parametrize("cluster", [SLOW, FAST], ids=["slow network", "fast network"])
def test_nothing_that_fits_is_much_faster(cluster: Cluster, budget: str) -> None:
    """All builders, meshes, prefetches, recomputed and kept layers."""
    trace = traced()
    limit = budgets(trace)[budget]
    found = search(trace, cluster, memory=limit)
    assert found.best.peak_bytes <= limit
    best = found.best.step_s
    for builder, mesh in arrangements(trace, cluster):
        for remat, kept, prefetch in itertools.product(range(0, 7, 2), range(0, 7, 2), (1, 2)):
            if builder == "ddp" and (kept or prefetch > 1):
                continue
            point = Point(builder, mesh, remat=remat, kept=kept, prefetch=prefetch)
            program = point.program(trace)
            if predict_memory(program).peak_bytes <= limit:
                assert simulate(program, cluster).seconds >= best * 0.995, point


@functools.cache
def in_the_middle() -> Found:
    return search(traced(), SLOW, memory=budgets(traced())["middle"])


def test_the_choice_is_a_schedule() -> None:
    trace = traced()
    found = in_the_middle()
    verify(found.program)
    assert found(found.program.trace) == found.program
    assert simulate(found.program, SLOW).seconds == found.best.step_s
    assert found.default is not None
    assert found.best.step_s < 0.95 * found.default.step_s
    assert predict_memory(found.default.point.program(trace)).peak_bytes <= found.budget
    seconds = [choice.step_s for choice in found.runners_up]
    assert [found.best.step_s, *seconds] == sorted([found.best.step_s, *seconds])


def test_it_says_why() -> None:
    found = in_the_middle()
    first, *rest = str(found).splitlines()
    assert first.startswith(str(found.best.point))
    assert "shorter than zero3(" in rest[1]
    assert rest[0].strip().startswith("no program takes less than")
    assert len(rest) == 2 + len(found.runners_up)
    assert "communication +" in rest[-1]


def test_its_first_line_says_that_nothing_beats_the_default() -> None:
    found = in_the_middle()
    assert "nothing else" not in str(found)
    first, *rest = str(dataclasses.replace(found, default=found.best)).splitlines()
    assert first.endswith("GiB; nothing else is faster than this default")
    assert "shorter" not in "".join(rest)


def test_another_mesh_than_the_state_s() -> None:
    found = search(traced(), SLOW, memory=budgets(traced())["ample"])
    other = (("replicate", 8), ("shard", 2))
    assert found.best.point.mesh != other
    with pytest.raises(ValueError, match=r"was found for the mesh \(.*the state is on \(replicate=8, shard=2\)"):
        found(traced().on(other))


@pytest.mark.nightly
def test_several_microbatches_reduce_once_where_memory_allows() -> None:
    trace = traced(microbatches=4)
    assert search(trace, SLOW, memory=1 << 40).best.point.defer
    assert not search(traced(), SLOW, memory=1 << 40).best.point.defer


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 4])
def test_no_sweep_finds_less_than_its_bound(microbatches: int) -> None:
    """Sweeps are left out by it: counting undeferred reductions, it left out a `zero3` for a `ddp` a third slower."""
    trace = traced(microbatches=microbatches)
    cluster = SLOW.replace(gpus_per_node=1, network_bandwidth=3e8)
    for builder, mesh in arrangements(trace, cluster):
        sweep = Sweep(Point(builder, mesh), trace, cluster, 1 << 40)
        choice = sweep.best()
        assert choice is not None and sweep.bound <= choice.step_s, choice


def test_sums_in_rank_order_stay_inside_nodes() -> None:
    """With `accumulate` all ranks exchange everything, which a mesh without nodes would send across the network."""
    trace = traced(precision=ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32))
    meshes = [dict(mesh) for _, mesh in arrangements(trace, SLOW)]
    assert all("node" in mesh or mesh["shard"] <= SLOW.gpus_per_node for mesh in meshes)
    found = search(trace, SLOW)
    verify(found.program)


def test_nothing_fits() -> None:
    with pytest.raises(DoesNotFit, match=r"needs .* on each rank, .* more than 1.00 MiB.*Largest: "):
        search(traced(), SLOW, memory=2**20)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "40GiB"}, "memory_bytes='40GiB', expected a positive number"),
        ({"memory": 62}, r"memory=62: expected bytes, 62 \* 2\*\*30 for 62 GiB"),
        ({"ranks": 0}, r"search\(ranks=0\): expected a number of ranks, 1 or more"),
        ({"stages": 2}, r"search\(stages=2\): expected numbers of pipeline stages, such as \(1, 2\)"),
        ({"stages": (0,)}, r"search\(stages=\(0,\)\): expected numbers"),
        ({"stages": (3,)}, "cannot be shared out to 16 ranks; .* Ranks divide into stages"),
    ],
)
def test_searches_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        search(traced(), SLOW, **options)


def test_a_search_takes_traces_of_one_step() -> None:
    for other in (traced()._replace(visits=traced().visits[1:]), traced().on((("shard", 8),))):
        with pytest.raises(ValueError, match=r"search: expected traces of one step, .* on as many ranks"):
            search([traced(), other], SLOW)


@pytest.mark.nightly
def test_more_memory_is_never_slower() -> None:
    trace = traced()
    low = budgets(trace)["tight"]
    high = budgets(trace)["ample"]
    times = [search(trace, SLOW, memory=low + (high - low) * k // 3).best.step_s for k in range(4)]
    assert all(after <= before * 1.005 for before, after in itertools.pairwise(times))


def test_points_in_words_are_python() -> None:
    trace = traced()
    names = {"ya": ya, **{n: getattr(ya.schedules, n) for n in ("ddp", "hpz", "hsdp", "zero3")}}
    for builder, mesh in arrangements(trace, SLOW):
        point = Point(builder, mesh, remat=2, kept=0 if builder == "ddp" else 3, prefetch=2 if builder != "ddp" else 1)
        call, _, on = str(point).partition(" on ")
        assert eval(call, names)(trace.on(mesh)) == point.program(trace)
        assert on == "" or all(f"{k}={v}" in on for k, v in point.mesh_arguments.items())


# ---- plan


def planned(*, rows: int = 4, **options: Any) -> Plan:
    arguments: dict[str, Any] = {"tx": TX, "ranks": 16, "cluster": SLOW, "precision": MIXED} | options
    return plan(*step_of(CONFIG, rows), **arguments)


def test_a_plan_is_its_parts() -> None:
    made = planned()
    assert made.program == zero3()(traced())
    assert made.step_s == simulate(made.program, SLOW).seconds
    assert made.bound == "communication"
    assert made.work.comm_s <= made.step_s
    assert 0 <= made.headroom < 1
    assert made.memory == predict_memory(made.program)
    assert made.fits
    assert made.check() is made
    assert "bound by communication" in str(made)


def test_a_plan_that_does_not_fit_is_a_plan() -> None:
    made = planned(memory=2**20)
    assert not made.fits
    assert "does NOT fit" in str(made)
    with pytest.raises(DoesNotFit, match="Largest: "):
        made.check()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cluster": "a100-80"}, "did you mean a100-80g"),
        ({"ranks": 18}, "take 16 or 20"),
        ({"ranks": 16, "replicate": 3}, r"mesh\(replicate=3, shard=-1\): the job has 16 ranks, not a multiple of 3"),
        ({"ranks": 16, "replicate": 2, "local": 16}, "local=16"),
        ({"schedule": hsdp()}, "has no replicas"),
        ({"schedule": lambda _: zero3()(traced(8))}, "mesh: it has shard=8, here it is shard=16"),
        ({"schedule": zero3()(traced(8))}, "mesh: it has shard=8, here it is shard=16"),
        (
            {"schedule": zero3(update=True), "tx": ya.optim.chain(TX, ya.optim.clip_by_global_norm(1.0))},
            "updates unit by unit, but",
        ),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planned(**options)


def test_a_program_is_planned_for_the_batch_at_hand() -> None:
    """Its own trace may have been taken for another batch, or know no costs at all."""
    trace = traced()
    learnt = trace._replace(visits=tuple(visit._replace(cost=Cost()) for visit in trace.visits))
    assert planned(schedule=zero3()(learnt)) == planned()


def test_a_schedule_that_was_not_called() -> None:
    with pytest.raises(TypeError, match=r"call it: schedule=ya\.schedules\.zero3"):
        planned(schedule=zero3)


def test_a_found_schedule_goes_into_a_plan() -> None:
    found: Found = search(traced(), SLOW)
    made = planned(schedule=found, **found.mesh)
    assert made.step_s == found.best.step_s


# ---- axes inside blocks


@functools.cache
def over_tensor(tensor: int, ranks: int = 16) -> Trace:
    """As many rows in a microbatch whatever the ranks of tensor, and as many microbatches in all."""
    return abstract_trace(
        *step_of(CONFIG, 4 * tensor, axes=Axes(tensor=tensor > 1, sequence=tensor > 1)),
        mesh=axes(ranks, tensor=tensor),
        precision=MIXED,
        microbatches=tensor,
        tx=TX,
    )


@pytest.mark.nightly
def test_search_over_axes_takes_the_best_of_all() -> None:
    traces = [over_tensor(n) for n in (1, 2)]
    limit = budgets(traces[0])["tight"]
    found = search(traces, SLOW, memory=limit)
    alone = [search(each, SLOW, memory=limit).best.step_s for each in traces]
    assert found.best.step_s == min(alone) < 0.95 * max(alone)
    found = search(traces, SLOW, memory=limit * 4 // 5)  # too little for whole layers
    assert found.mesh["tensor"] == found.program.trace.inside[0][1] == 2
    assert "tensor=2" in str(found)
    assert found(found.program.trace) == found.program
    assert found.program.trace.microbatches * found.program.trace.batch_ranks == 16
    verify(found.program)


@pytest.mark.nightly
def test_search_over_axes_on_stages() -> None:
    found = search([over_tensor(2)], SLOW, stages=(2,))
    assert found.mesh["stage"] == 2
    assert found.default is None
    assert found.stages is not None
    assert found.program.trace.microbatches * found.program.trace.batch_ranks == 16


@pytest.mark.parametrize("mesh", [(("shard", 4), ("tensor", 2)), (("node", 2), ("local", 2), ("tensor", 2))])
def test_arrangements_keep_the_axes_inside_blocks(mesh: Any) -> None:
    trace = over_tensor(2, 8).on(mesh)
    found = list(arrangements(trace, SLOW))
    assert ("hpz", (("node", 2), ("local", 2), ("tensor", 2))) in found
    assert "ddp" not in dict(found)
    for builder, on in found:
        assert Point(builder, on).program(trace).trace.ranks * dict(on).get("replicate", 1) == 8


def test_a_plan_over_axes() -> None:
    given: dict[str, Any] = {"tx": TX, "cluster": SLOW, "precision": MIXED, "tensor": 2, "context": 2}
    where = step_of(CONFIG, axes=Axes(tensor=True, context=True))
    made = plan(*where, ranks=16, **given)
    assert made.program.trace.mesh == (("shard", 4), ("context", 2), ("tensor", 2))
    assert made.tokens == 4 * 64 * 8  # two ranks of context have other tokens, two of tensor the same
    staged = plan(*where, ranks=32, stages=2, schedule=one_f_one_b(), **given)
    assert staged.tokens == made.tokens
    assert staged.program.trace.mesh[0] == ("stage", 2)
    with pytest.raises(ValueError, match=r"mesh\(shard=-1, tensor=3\): the job has 16 ranks, not a multiple of 3"):
        plan(*where, tx=TX, ranks=16, cluster=SLOW, tensor=3)
    with pytest.raises(ValueError, match=r"axes inside blocks \{'context': 2, 'tensor': 2\}, and they cannot change"):
        made.program.trace.on((("shard", 8), ("tensor", 2)))


def test_parts_of_a_unit_are_gathered_by_those_that_hold_them() -> None:
    """Over tensor every second rank; what is not split, all of them."""
    trace = over_tensor(2)._replace(mesh=(("shard", 4), ("context", 2), ("tensor", 2)))
    costs = Costs(trace, SLOW)
    assert costs.holders == {("tensor",): CollectiveRanks(8, 2), (): CollectiveRanks(16, 4)}
    split, whole = (next(u for u in trace.units if bool(u.over) == over) for over in (True, False))
    alone = [costs.phases(Gather((unit.id,), (0,))) for unit in (split, whole)]
    assert alone == [
        SLOW.ring(split.gather_bytes, CollectiveRanks(8, 2)),
        SLOW.ring(whole.gather_bytes, CollectiveRanks(16, 4)),
    ]
    assert costs.phases(Gather((split.id, whole.id), (0, 1))) == sum(alone, ())
    with pytest.raises(ValueError, match="tensor=3: 3 neighbouring ranks do not lie evenly on nodes of 4"):
        Costs(trace._replace(mesh=(("shard", 8), ("tensor", 3)), units=()), SLOW)
