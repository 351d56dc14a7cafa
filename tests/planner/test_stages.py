"""Pipelines in simulation: bubbles of the textbooks, transfers by hand, memory of stages, and the search over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.planner.pipelines import NO_LINKS, chain, pipeline
from tests.planner.test_search import SLOW, TX, planned, traced
from tests.planner.test_simulate import GB, times
from yafsdp_fn.pipelines.orders import FACTORIES, gpipe, one_f_one_b, zero_bubble
from yafsdp_fn.planner import DoesNotFit, Plan, plan, predict_memory, search, simulate
from yafsdp_fn.planner.simulate import run, tasks
from yafsdp_fn.program.measured import Cost, OptimizerMemory, Value
from yafsdp_fn.program.ops import Backward, Receive, Send
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import Trace, remat, zero1, zero2
from yafsdp_fn.timeline.text import shown

# ---- bubbles, of equal segments with B = 2 F and I = W = F

FORMULAS: dict[str, tuple[int, Callable[[int, int], float]]] = {
    "gpipe": (1, lambda p, m: (p - 1) / (m + p - 1)),
    "one_f_one_b": (1, lambda p, m: (p - 1) / (m + p - 1)),
    "interleaved": (3, lambda p, m: (p - 1) / (3 * m + p - 1)),
    "zero_bubble": (1, lambda p, m: (p - 1) / (3 * m + p - 1)),
    "v_shaped": (2, lambda p, m: (p - 1) / (6 * m + p - 1)),
}
"""Segments of a stage, and the part of the step in which compute is idle; of ZB-V, its first and last calls alone."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("stages", [2, 4])
def test_bubbles_of_the_textbooks(name: str, stages: int) -> None:
    per_stage, formula = FORMULAS[name]
    shape: Any = "v" if name == "v_shaped" else "loop"
    for microbatches in (2 * stages, 2 * stages + 1):
        trace = chain(stages * per_stage, microbatches)
        made = verify(pipeline(trace, stages, FACTORIES[name](zero1()), per_stage, shape))
        timeline = simulate(made, NO_LINKS)
        assert timeline.bubble == pytest.approx(formula(stages, microbatches), abs=1e-12)
        idle = sum(timeline.bubbles().values())
        assert idle == pytest.approx(timeline.bubble * timeline.seconds * stages)
        assert not timeline.bubbles().keys() - {"fill", "drain", "receive"}


def test_a_bubble_by_cause() -> None:
    """Two stages, two microbatches: F0 F1 . B0 B1 above, . F0 B0 F1 B1 below."""
    timeline = simulate(pipeline(chain(2, 2), 2, one_f_one_b(zero1())), NO_LINKS)
    spans = [times(stage.on("compute")) for stage in timeline.by_stage]
    assert spans == [[(0, 1), (1, 2), (4, 6), (7, 9)], [(1, 2), (2, 4), (4, 5), (5, 7)]]
    first, second = timeline.by_stage
    assert first.bubbles() == {"receive": 3}
    assert second.bubbles() == {"fill": 1, "drain": 2}
    assert [(gap.why, gap.waited) for gap in timeline.by_stage[1].idle()] == [("fill", True), ("drain", False)]
    path = [(span.stage, type(span.op).__name__) for span in timeline.critical_path() if span.stream == "compute"]
    assert path == [(0, "Forward"), *[(1, "Forward"), (1, "Backward")] * 2, (0, "Backward")]
    assert all(after.start == before.end for before, after in itertools.pairwise(timeline.critical_path()))


def test_a_timeline_of_several_stages_has_parts() -> None:
    made = pipeline(chain(4, 3), 2, one_f_one_b(zero1()))
    timeline = simulate(made, NO_LINKS)
    assert [part.trace for part in timeline.by_stage] == [part.trace for part in made.by_stage]
    assert [span[1:4] for part in timeline.by_stage for span in part.spans] == [span[1:4] for span in timeline.spans]
    for part in timeline.by_stage:
        assert [span.number for span in part.spans] == [*range(len(part.spans))]
        assert part.by_stage == (part,)
        assert part.seconds == timeline.seconds
        assert type(part) is type(timeline)
    for what in ("on", "busy", "idle"):
        with pytest.raises(TypeError, match=": expected the timeline of one stage, got one of 2; take one stage at a"):
            getattr(timeline, what)("compute")
    with pytest.raises(TypeError, match="to_json: expected the timeline of one stage"):
        timeline.to_json()
    assert type(timeline).from_json(timeline.by_stage[1].to_json()) == timeline.by_stage[1]


def test_a_transfer_is_one_at_both_ends() -> None:
    """1 GB at 1 GB/s, and half a second of latency: both ends are under way together."""
    cluster = NO_LINKS.replace(network_bandwidth=float(GB), network_latency=0.5)
    timeline = simulate(pipeline(chain(2, 1, GB), 2, one_f_one_b(zero1())), cluster)
    (sent,), (received,) = timeline.by_stage[0].on("send"), timeline.by_stage[1].on("receive")
    assert (sent.start, sent.end) == (received.start, received.end) == (1, 2.5)
    assert times(timeline.by_stage[1].on("compute")) == [(2.5, 3.5), (3.5, 5.5)]
    assert timeline.seconds == 5.5 + 1.5 + 2
    assert [(c.source, c.target, c.link, c.messages, c.nbytes) for c in timeline.crossings] == [
        (0, 1, "network", 1, GB),
        (1, 0, "network", 1, GB),
    ]


def test_a_transfer_shares_the_links_of_both_ends() -> None:
    """On nodes of one: the last stage gathers a layer, and a message comes to it, 2 s each alone: where they meet, each
    has half of the link."""
    units = chain(4, 1, GB).units
    heavy = tuple(u._replace(gather_bytes=4 * GB if u.id == 3 else 0, reduce_bytes=0) for u in units)
    trace = chain(4, 1, 2 * GB)._replace(units=heavy, mesh=(("shard", 2),))
    made = pipeline(trace, 2, one_f_one_b(zero1(prefetch=0)))
    cluster = NO_LINKS.replace(network_bandwidth=float(GB))
    own = simulate(made, cluster).by_stage
    (gather,) = [s for s in own[1].on("gather") if s.seconds]
    assert gather.start == 0
    assert gather.end == 2
    assert own[1].on("receive")[0].start == 2
    shared = simulate(made, cluster.replace(matmul_flops=2e12)).by_stage
    (gather,) = [s for s in shared[1].on("gather") if s.seconds]
    (received,), (sent,) = shared[1].on("receive"), shared[0].on("send")
    assert gather.start == 0
    assert gather.end == 3
    assert received.start == 1
    assert received.end == 4
    assert sent.start == 1
    assert sent.end == 4


@pytest.mark.parametrize(("per_node", "links"), [(2, ["network", "node", "network"]), (4, ["node"] * 3)])
def test_neighbouring_stages_share_a_node(per_node: int, links: list[str]) -> None:
    """One rank a stage: stages 1 and 2 of four on nodes of two are apart, 0 and 1 together."""
    timeline = simulate(pipeline(chain(4, 1), 4, one_f_one_b(zero1())), NO_LINKS.replace(gpus_per_node=per_node))
    found = {(c.source, c.target): c.link for c in timeline.crossings}
    assert [found[s, s + 1] for s in range(3)] == (links if per_node == 4 else ["node", "network", "node"])


def test_stages_that_do_not_lie_on_nodes() -> None:
    made = pipeline(chain(2, 1)._replace(mesh=(("stage", 2), ("shard", 3))), 2, one_f_one_b())
    with pytest.raises(ValueError, match=r"2 stages of 3 ranks do not lie evenly on nodes of 2 GPUs \(free\)"):
        simulate(made, NO_LINKS.replace(gpus_per_node=2))


def test_messages_that_nobody_receives() -> None:
    made = pipeline(chain(2, 1), 2, one_f_one_b())
    deaf = made.with_ops((op for op in made.stages[1] if not isinstance(op, Receive)), 1)
    with pytest.raises(Refused, match="rule 'flow'"):
        simulate(deaf, NO_LINKS)


def test_stages_that_wait_for_each_other() -> None:
    """Each sends its second message first: the streams are in order."""
    made = pipeline(chain(2, 2), 2, gpipe())
    sends = [op for op in made.stages[0] if isinstance(op, Send)]
    swapped = {sends[0]: sends[1], sends[1]: sends[0]}
    wrong = made.with_ops(swapped.get(op, op) for op in made.stages[0])
    with pytest.raises(ValueError, match="the stages wait for each other for ever"):
        run(wrong, tasks(wrong, NO_LINKS), NO_LINKS)
    with pytest.raises(Refused, match="rule 'flow'"):
        simulate(wrong, NO_LINKS)


def test_every_stage_updates_after_the_norm_of_all() -> None:
    trace = chain(2, 1)._replace(update_when="after norm")
    timeline = simulate(pipeline(trace, 2, one_f_one_b()), NO_LINKS.replace(memory_bandwidth=1.0))
    ends = [next(s.end for s in own.spans if type(s.op).__name__ == "Norm") for own in timeline.by_stage]
    for own in timeline.by_stage:
        assert next(s.start for s in own.spans if type(s.op).__name__ == "Update") == max(ends) > min(ends)


def test_halves_of_a_backward_cost_what_it_does() -> None:
    """With attention, a recomputation, and a head whose backward is all of weights."""
    cost = Cost(flops=10**12, bwd_flops=3 * 10**12, attention_flops=10**12, bwd_attention_flops=2 * 10**12)
    trace = chain(2, 1)
    visits = [v._replace(cost=cost._replace(arguments=v.cost.arguments)) for v in trace.visits]
    made = pipeline(trace._replace(visits=tuple(visits)), 2, zero_bubble(zero1(remat=remat.all)))
    computes = simulate(made, NO_LINKS).by_stage[1].on("compute")
    halves = {s.op.half: s.seconds for s in computes if isinstance(s.op, Backward)}
    assert halves == {"inputs": 2 + 1 + 2, "weights": 2}


# ---- memory


def remembering(count: int, microbatches: int) -> Trace:
    """A chain in which each layer takes 100 bytes, gives 100, keeps 1000 inside, and 300 between halves."""
    values = [Value(k, 100, 100) for k in range(count + 1)]
    trace = chain(count, microbatches, 100)
    visits = [
        v._replace(
            cost=v.cost._replace(
                takes=(values[v.id],), gives=(values[v.id + 1],), inner_bytes=1000, peak_bytes=100, between_bytes=300
            )
        )
        for v in trace.visits
    ]
    adam = OptimizerMemory(shards=tuple((unit.numel, 8, 1) for unit in trace.units))
    names = ya.Precision().names
    return trace._replace(visits=tuple(visits), precision=names, optimizer=adam)


def test_a_stage_keeps_what_is_under_way() -> None:
    """1F1B: stage s of P has P - s microbatches under way, GPipe all; each holds what it took, kept and gave."""
    one, all_ = (pipeline(remembering(4, 8), 4, f(zero1())).by_stage for f in (one_f_one_b, gpipe))
    each = [predict_memory(part) for part in one]
    assert [m.activations for m in each] == [1200 * (4 - s) for s in range(4)]
    assert [predict_memory(part).activations for part in all_] == [1200 * 8] * 4
    assert [m.optimizer for m in each] == [8 * -(-(10 + s) // 8) * 8 for s in range(4)]
    assert all(m.master == m.grad_shards > 0 for m in each)


def test_halves_keep_factors_until_the_second() -> None:
    """Stage 1 of two has its second half after the next microbatch's first."""
    made = pipeline(remembering(2, 4), 2, zero_bubble(zero1()))
    kinds = [(op.half, op.microbatch) for op in made.stages[1] if isinstance(op, Backward)]
    assert kinds[:3] == [("inputs", 0), ("inputs", 1), ("weights", 0)]
    plain = predict_memory(pipeline(remembering(2, 4), 2, one_f_one_b(zero1())).by_stage[1])
    halved = predict_memory(made.by_stage[1])
    assert plain.activations == 1200
    assert halved.activations == 1200 + 300


# ---- plan and search


def test_a_plan_has_its_stages() -> None:
    made = planned(microbatches=4, stages=2, schedule=one_f_one_b(zero2()))
    assert len(made.program.stages) == made.timeline.stage_count == 2
    assert made.stages == tuple(map(predict_memory, made.program.by_stage))
    assert made.memory in made.stages
    assert made.fits
    assert made.memory.peak_bytes == max(each.peak_bytes for each in made.stages)
    assert made.step_s == simulate(made.program, SLOW).seconds
    assert made.work.seconds < made.step_s
    text = str(made)
    assert "2 stages, 4 microbatches: bubble" in text
    assert "stage 1" in text
    assert "memory of stage" in text
    assert planned(microbatches=4, stages=2).program == made.program
    with pytest.raises(TypeError, match="the mesh has 2 stages, and the schedule returned a Program of 1"):
        planned(microbatches=4, stages=2, schedule=zero2())
    with pytest.raises(ValueError, match="stages=3 does not divide 16 ranks"):
        planned(microbatches=4, stages=3)


def test_a_bubble_is_nothing_that_an_overlap_saves() -> None:
    staged = planned(rows=1, ranks=4, stages=2, schedule=one_f_one_b(zero2()))
    assert f"; bubble and waits take {100 * staged.headroom:.1f}% of the step\n" in str(staged)
    assert "2 stages, 1 microbatch: bubble " in str(staged)
    assert "; a perfect overlap would save " in str(planned(rows=1, ranks=4))


def test_a_plan_says_how_many_tokens_its_time_is_of() -> None:
    """Four stages read a quarter of the batches: in seconds a step they look faster than they are."""
    alone = planned(microbatches=4, schedule=zero2())
    staged = planned(microbatches=4, stages=4, schedule=one_f_one_b(zero2()))
    for made, count in ((alone, 16), (staged, 4)):
        assert made.tokens == count * 4 * 64
        assert made.unit == "tokens"
        assert made.tokens_per_s == made.tokens / made.step_s
        low, high = made.range_s
        assert low < made.step_s < high
        step = shown(made.step_s, 4)
        span = f"{shown(low, 3)} to {shown(high, 3)}"
        first = f"{step} ({span}) a step of {made.tokens:,} tokens on {SLOW.name}: {made.tokens_per_s:,.0f} tokens/s"
        assert repr(made).startswith(f"Plan({step} a step on {SLOW.name}, bound by ")
        assert "\n" not in repr(made)
        assert str(made).startswith(first + "\n")
    assert str(Plan.of(alone.program, SLOW)).splitlines()[0].endswith(f") a step on {SLOW.name}")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"tokens": torch.zeros(3, 5, dtype=torch.long), "weight": torch.zeros(3)}, (30, "tokens")),
        ({"image": torch.zeros(3, 2, 7, 7), "label": torch.zeros(3, dtype=torch.long)}, (6, "rows")),
        ({"from": torch.zeros(3, 5, dtype=torch.int), "to": torch.zeros(3, 4, dtype=torch.int)}, (6, "rows")),
        ({"x": torch.zeros(3, 5), "y": torch.zeros(2)}, (0, "rows")),
        ({"scale": 2.0}, (0, "rows")),
    ],
)
def test_what_a_batch_counts(batch: Any, expected: tuple[int, str]) -> None:
    def loss(params: Any, _: Any) -> torch.Tensor:
        return ya.apply(lambda weight, x: x @ weight, params, torch.ones(4, 4)).sum()

    made = plan(loss, ya.Param((4, 4)), batch, tx=TX, ranks=2, cluster=SLOW)
    assert (made.tokens, made.unit) == expected


@pytest.mark.nightly
def test_a_search_over_stages_finds_what_it_says() -> None:
    """On a slow network fewer ranks share a unit: stages win. The best is what it says it is, right, and fits."""
    trace = traced(microbatches=4)
    alone = search(trace, SLOW)
    found = search(trace, SLOW, stages=(1, 2, 4))
    assert found.best.step_s < alone.best.step_s
    assert found.best.point.order is not None
    program = found.program
    assert len(program.stages) > 1
    verify(program)
    assert simulate(program, SLOW).seconds == found.best.step_s
    assert predict_memory(program).peak_bytes == found.best.peak_bytes <= found.budget
    assert found.mesh["stage"] == found.best.point.order.stages
    assert found.stages is not None
    assert found(found.best.point.order.whole(trace, found.best.point.mesh)) == program
    tokens = program.trace.microbatches * program.trace.stage_ranks
    assert tokens == trace.microbatches * trace.ranks
    assert f"{found.best.point.order.microbatches} microbatches" in str(found)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 4])
def test_no_order_is_faster_than_its_bound(stages: int) -> None:
    from yafsdp_fn.planner.search import Sweep, points

    trace = traced(microbatches=2)
    for each in points(trace, (stages,), 16, SLOW, 32):
        sweep = Sweep(*each, SLOW, 1 << 40)
        choice = sweep.best(math.inf)
        assert choice is not None and sweep.bound <= choice.step_s, choice


def test_more_ranks_than_microbatches_need_stages() -> None:
    trace = traced(4)
    with pytest.raises(ValueError, match="4 microbatches cannot be shared out to 16 ranks; take more stages"):
        search(trace, SLOW, ranks=16)
    found = search(trace, SLOW, ranks=16, stages=(1, 2, 4, 8))
    assert found.mesh["stage"] >= 4
    with pytest.raises(DoesNotFit):
        search(trace, SLOW, ranks=16, stages=(4,), memory=2**20)
