"""The collectives of a visit in its trace: found on fake tensors, printed, compared and costed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64
from tests.harness.marks import nightly
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import optim
from yafsdp_fn.planner import Cluster, simulate
from yafsdp_fn.planner.simulate import LINKS, tasks
from yafsdp_fn.program.trace import Between, Collectives
from yafsdp_fn.schedules import Backward, Forward, Program, Trace, zero3
from yafsdp_fn.timeline.timeline import Timeline


def step_of(of: Options, **options: Any) -> Any:
    return ya.train_step(loss_of(of), optim.sgd(0.1), **options)


def begun(axes: dict[str, int], of: Options) -> tuple[ya.ShardedState, Any]:
    """A state, and this rank's part of a batch."""
    mesh = mesh_of(**axes)
    state = ya.init(params(of), optim.sgd(0.1), mesh=mesh, precision=FLOAT64)
    return state, ya.shard_batch(batch_of(0), mesh, split={"context": 1}, zigzag=of.zigzag)


def traced(_: Any, axes: dict[str, int], of: Options) -> Trace:
    """On fake tensors, from a state."""
    trace: Trace = step_of(of).trace(*begun(axes, of))
    return trace


def words(calls: Collectives) -> list[str]:
    return [f"{call.kind} {call.axis} {call.nbytes}" for call in calls]


SEQUENCE = Options(sequence_parallel=True)


def test_a_visit_lists_what_its_block_calls(pools: Pools) -> None:
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
    assert between.after == 2
    assert words(between.collectives) == ["all_gather tensor 2048"]
    assert words(between.adjoints) == ["psum_scatter tensor 2048"]
    for other in others:
        assert other.between == here.between
        assert [visit[5:] for visit in other.visits] == [visit[5:] for visit in here.visits]


def test_they_are_printed_and_part_of_what_ranks_compare(pools: Pools) -> None:
    here, _ = pools[2].run(traced, {"context": 2}, Options(zigzag=True))
    program = zero3()(here)
    line = "in layers[0] to layers[1]: 2 x ppermute context (2.0 KiB); backward: 2 x ppermute context (2.0 KiB)"
    assert line in str(program).splitlines()
    assert Program.from_json(program.to_json()) == program
    first, visit, *rest = here.visits
    one, two = visit.collectives
    for calls, same in (
        ((one,), False),
        ((one, one, two), False),
        ((one._replace(kind="psum"), two), False),
        ((one._replace(nbytes=1), two), True),  # as batches are
    ):
        changed = visit._replace(collectives=calls)
        other = program.with_trace(here._replace(visits=(first, changed, *rest)))
        assert (other.fingerprint() == program.fingerprint()) == same
    own = here._replace(between=(Between(-1, (one,), ()),))
    assert program.with_trace(own).fingerprint() != program.fingerprint()
    wrong = program.with_trace(here._replace(between=(Between(4, (), ()),)))
    with pytest.raises(ValueError, match=r"trace.between\[0\].after: expected -1 or one of the 4 visits, got 4"):
        Program.from_json(wrong.to_json())
    foreign = visit._replace(collectives=(one._replace(axis="tensro"),))
    with pytest.raises(ValueError, match=r"trace.visits\[1\]: ppermute over 'tensro' of 2048 bytes; axes are context"):
        Program.from_json(program.with_trace(here._replace(visits=(first, foreign))).to_json())


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


def test_they_cost_what_their_axis_crosses(pools: Pools) -> None:
    """Tensor ranks share a node of two, the two experts do not."""
    here = pools[4].run(traced, {"expert": 2, "tensor": 2}, SEQUENCE)[0]
    ring = 2048 / 2 / 1e6
    exchange = 8192 / 2 * 2 / 1e5
    for program, again in ((zero3()(here), 0), (zero3(remat="all")(here), 1)):
        found = seconds(program)
        once = 4 * ring + 2 * exchange
        assert found[Forward, 1] == pytest.approx(once)
        assert found[Forward, 2] == pytest.approx(once + ring)  # with that of the loss after it
        assert found[Backward, 1] == pytest.approx(once * (1 + again))
        assert found[Backward, 2] == pytest.approx(once * (1 + again) + ring)


def test_a_ring_over_nodes(pools: Pools) -> None:
    here = pools[4].run(traced, {"context": 4}, Options(zigzag=True))[0]
    assert seconds(zero3()(here))[Forward, 1] == pytest.approx(6 * 1024 / 1e5)  # one of a node's two leaves it


# ---- learnt from a real step


@on_ranks(2)
@pytest.mark.parametrize(
    ("axes", "of"), [({"tensor": 2}, SEQUENCE), nightly({"context": 2}, Options(tied=True, zigzag=True))]
)
def test_a_step_finds_the_same(_: Any, axes: dict[str, int], of: Options) -> None:
    """Of one state, on fake tensors and from a step; the program goes on from a checkpoint's text, too."""
    state, cut = begun(axes, of)
    step = step_of(of, microbatches=2)
    faked = step.trace(state, cut)
    state, _ = step(state, cut)
    found = step.program(state)
    again = step_of(of, microbatches=2, schedule=Program.from_json(found.to_json()))
    lowered = step_of(of, microbatches=2, schedule=zero3()(faked))
    for other in (step, again, lowered) * 2:
        state, _ = other(state, cut)
    found = found.trace
    assert found.between == faked.between
    assert [visit[5:] for visit in found.visits] == [visit[5:] for visit in faked.visits]
    assert any(visit.collectives for visit in found.visits)


@on_ranks(2)
def test_what_nobody_differentiates_has_no_backward(_: Any) -> None:
    """A loss with a visit without grad, and what nobody differentiates, evaluated and trained with."""
    mesh = mesh_of(tensor=2)
    tree = {"layers": ya.Stacked({"w": torch.ones(2, 3, dtype=torch.float64)}), "other": {"w": torch.ones(3)}}

    def loss(p: Any, x: Tensor) -> Any:
        with torch.no_grad():
            shown = ya.apply(lambda w: ya.psum(w["w"], "tensor"), p["other"])
        x, ys = ya.scan(lambda x, w: (ya.psum(x * w["w"], "tensor"), ya.psum(w["w"].sum(), "tensor")), x, p["layers"])
        return ya.Mean((x + ya.apply(lambda w: w["w"] * 2, p["other"])).sum(), 1.0), {
            "ys": ys.sum(),
            "shown": shown.sum(),
        }

    state = ya.shard(tree, optim.sgd(1e-3), mesh=mesh, precision=FLOAT64)
    # a graph that is kept goes back through what nobody differentiates, too, with zeros
    step = ya.train_step(loss, optim.sgd(1e-3), has_aux=True, schedule=zero3(remat="all"))
    evaluate = ya.eval_step(loss, has_aux=True)
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(3):
        evaluate(state.params, x)
        state, _ = step(state, x)
    trace = step.program(state).trace
    layer = trace.visits[0]
    assert words(layer.collectives) == ["psum tensor 24", "psum tensor 8"]
    assert words(layer.adjoints) == ["psum tensor 24"]  # not that of ys


@on_ranks(2)
def test_sizes_are_those_of_the_batch(_: Any) -> None:
    """Batches of another length go on, other sizes of the same batch do not; nor do others between visits."""
    mesh = mesh_of(tensor=2)
    extra = {"rows": 0, "loss": False}
    tree = {"layers": ya.Stacked({"w": torch.ones(2, 3, dtype=torch.float64)})}

    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        more = torch.cat([x, x[: extra["rows"]]])
        return ya.psum(more * w["w"], "tensor")[: len(x)], None

    def loss(p: Any, x: Tensor) -> Any:
        x = ya.scan(block, x, p["layers"])[0]
        return (ya.psum(x, "tensor") if extra["loss"] else x).sum()

    state = ya.shard(tree, optim.sgd(1e-3), mesh=mesh, precision=FLOAT64)
    step = ya.train_step(loss, optim.sgd(1e-3))
    said = list[str]()
    for rows, more, in_loss in (
        (4, 0, False),
        (6, 0, False),
        (4, 0, False),
        (4, 2, False),
        (4, 0, True),
        (4, 0, False),
    ):
        extra |= {"rows": more, "loss": in_loss}
        try:
            state, _ = step(state, torch.ones(rows, 3, dtype=torch.float64))
        except ya.errors.OrderChanged as error:
            said.append(str(error))
    size, loss = said
    assert size.startswith("forward of layers[0] (visit 0, microbatch 0, step 3): expected its collective 0 to be ")
    both = "psum over 'tensor', 96 bytes of torch.float64; got psum over 'tensor', 144 bytes of torch.float64"
    assert both in size
    assert loss.startswith("the loss after forward of layers[1] (visit 1, microbatch 0, step 3): expected its ")
    assert "collective 0 to be none; got psum over 'tensor', 96 bytes" in loss


# ---- in timelines


def recorded(_: Any) -> str:
    state, batch = begun({"tensor": 2}, SEQUENCE)
    step = step_of(SEQUENCE, schedule=zero3(remat="all"))
    state, _ = step(state, batch)
    with ya.timeline.record() as recording:
        step(state, batch)
    return recording.timeline().to_json()


def test_timelines_show_them(pools: Pools, tmp_path: Path) -> None:
    measured = Timeline.from_json(pools[2].run(recorded)[0])
    predicted = simulate(zero3()(pools[2].run(traced, {"tensor": 2}, SEQUENCE)[0]), "a100-80g")
    assert measured.inside
    assert "in the collectives of blocks" in str(measured)
    of_visit = measured.trace.visits[1]
    forward, backward = (
        next(span for span in measured.spans if isinstance(span.op, kind) and span.op.visit == 1)
        for kind in (Forward, Backward)
    )
    own, adjoints = ([f"{c.kind} {c.axis}" for c in calls] for calls in of_visit[5:])
    assert [each.name for each in forward.inside] == own
    assert len(own) == 4
    assert [each.name for each in backward.inside] == [*own, *adjoints]
    (first, *_) = [span for span in predicted.spans if isinstance(span.op, Forward) and span.op.visit == 1]
    assert [each.name for each in first.inside] == own
    for timeline in (measured, predicted):
        for span in timeline.spans:
            times = [span.start, *(time for each in span.inside for time in each[:2]), span.end]
            assert times == sorted(times)
    measured.save(tmp_path / "step.svg")
    assert "collectives in a block" in (tmp_path / "step.svg").read_text()
    text = measured.to_json().replace('"psum tensor"]', "1]")
    with pytest.raises(ValueError, match=r"spans\[\d+\].inside\[\d+\].name: expected a string, got 1"):
        Timeline.from_json(text)


@on_ranks(4)
def test_sizes_of_uneven_exchanges_may_change(_: Any) -> None:
    """Sizes from data: of an exchange, and of what follows it in its block, other ones in each step and line."""
    mesh = mesh_of(expert=2, tensor=2)
    now = {"step": 0}
    tree = {"layers": ya.Stacked({"w": torch.full((2, 3), 0.5, dtype=torch.float64)})}

    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        me = ya.axis_index("expert")
        more = now["step"] % 2
        table = [(1 + k + more, 3 - k - more) for k in range(2)]  # rows of each rank, to each
        sent = table[me]
        received = tuple(each[me] for each in table)
        there = ya.all_to_all(x, "expert", 0, 0, tiled=True, split_sizes=sent, concat_sizes=received)
        there = ya.psum(there * w["w"], "tensor") / 2
        back = ya.all_to_all(there, "expert", 0, 0, tiled=True, split_sizes=received, concat_sizes=sent)
        return back, None

    def loss(p: Any, x: Tensor) -> Tensor:
        return ya.scan(block, x, p["layers"])[0].sum()

    state = ya.shard(tree, optim.sgd(0.0), mesh=mesh, precision=FLOAT64)
    step = ya.train_step(loss, optim.sgd(0.0))
    found = list[float]()
    for now["step"] in range(4):
        state, metrics = step(state, torch.ones(4, 3, dtype=torch.float64))
        found.append(float(metrics["loss"]))
    kinds = [call.kind for call in step.program(state).trace.visits[0].collectives]
    assert kinds == ["uneven all_to_all", "psum", "uneven all_to_all"]
    assert found == pytest.approx([found[0]] * 4)
    assert found[0] > 0
