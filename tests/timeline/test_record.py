"""Measured timelines: one span per op that ran, in the order of its stream, never before what it waits for."""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.gpu import on_gpu
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, TX, base_loss, base_params
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Gather, Norm, Program, Reduce, Scoreboard, Update, remat
from yafsdp_fn.timeline import Timeline, record

Mesh = Any
s = ya.schedules

SCHEDULES = {
    "zero3": s.zero3(),
    "zero3 remat": s.zero3(prefetch=2, remat=remat.all),
    "zero3 update": s.zero3(update=True),
    "zero2 update": s.zero2(update=True),
    "zero1": s.zero1(),
    "offload": s.zero3(remat=remat.offload()),
}


def check(timeline: Timeline, title: str) -> None:
    """What holds for every measured timeline."""
    assert timeline.title == title
    numbers = [span.number for span in timeline.spans]
    assert numbers == sorted(set(numbers))
    at = {span.number: span for span in timeline.spans}
    for span in timeline.spans:
        assert 0 <= span.start <= span.end <= timeline.seconds
        assert (span.microbatch is None) == (not isinstance(span.op, Forward | Backward))
        assert span.cause is None or (span.cause < span.number and at[span.cause].end <= span.start)
    for stream in timeline.streams:
        for one, two in itertools.pairwise(timeline.on(stream)):
            assert one.end <= two.start
            assert two.cause is not None
            assert at[two.cause].end >= one.end
    assert timeline.seconds == max(span.end for span in timeline.spans)
    path = timeline.critical_path()
    assert path[-1].end == timeline.seconds
    assert path[0].cause is None
    assert sum(gap.end - gap.start for gap in timeline.idle()) + timeline.compute_s == pytest.approx(timeline.seconds)


def check_program(timeline: Timeline, program: Program) -> None:
    """Every op of the program, by its number, after all that the scoreboard makes it wait for."""
    assert timeline.trace == program.trace
    spans = [span for span in timeline.spans if span.number >= 0]
    inside = spans[: len(program.ops)]
    assert [span.op for span in inside] == list(program.ops)
    assert [span.number for span in inside] == list(range(len(program.ops)))
    computes = [span for span in inside if isinstance(span.op, Forward | Backward)]
    assert [span.microbatch for span in computes] == [compute.microbatch for compute in program.trace.order]
    trained = tuple(unit.id for unit in program.trace.units if unit.trainable)
    after = [] if program.has_updates else [Norm(trained), Update(trained)]
    assert [span.op for span in spans[len(program.ops) :]] == after
    board: Scoreboard[int] = Scoreboard()
    at = {span.number: span for span in spans}
    for span in spans:
        assert span.stream == span.op.stream
        for wait in board.use(span.number, span.stream, *span.op.uses()):
            assert at[wait].end <= span.start, (timeline.describe(span), wait)


def steps_of(mesh: Mesh, schedule: str, problem: str, **options: Any) -> tuple[list[Timeline], Program]:
    rank = torch.distributed.get_rank()
    state = ya.init(PROBLEMS[problem].params(3), TX, mesh=mesh)
    step = ya.train_step(PROBLEMS[problem].loss, TX, schedule=SCHEDULES[schedule], **options)
    with record() as recording:
        for number in range(3):
            state, _ = step(state, batch_of(rank, seed=number))
    program = step.program(state)
    assert program is not None
    return list(recording.timelines), program


@on_ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks(mesh: Mesh, schedule: str) -> None:
    timelines, program = steps_of(mesh, schedule, "tied" if schedule == "zero3" else "base", microbatches=3)
    assert len(timelines) == 3
    for timeline, missing in zip(timelines, (program.carried(), {}, {}), strict=True):
        check(timeline, f"measured, rank {mesh.get_rank()} of 2")
        check_program(timeline, program)
        before = [(span.number, span.op) for span in timeline.spans if span.number < 0]
        gathers = [Gather((unit,), (slot,)) for slot, unit in missing.items()]
        assert before == list(enumerate(gathers, -len(gathers)))
    assert bool(program.carried()) == ("update" in schedule)


@on_ranks(2)
def test_replicas_that_hold_it_all(mesh: Mesh) -> None:
    """Ops with nothing to do have no span, and the others keep their numbers."""
    timelines, program = steps_of(ya.mesh(replicate=2, device="cpu"), "zero3", "base", donate=False)
    check(timelines[-1], f"measured, rank {mesh.get_rank()} of 2")
    ran = [(k, op) for k, op in enumerate(program.ops) if not isinstance(op, Gather | Reduce)]
    assert any(isinstance(op, AllReduce) for _, op in ran)
    assert [(span.number, span.op) for span in timelines[-1].spans[: len(ran)]] == ran


@on_ranks(2)
def test_updates_follow_the_gradient_they_use(mesh: Mesh) -> None:
    """Gradients and their update, an evaluation between them, and a step on a plain state."""
    rank = torch.distributed.get_rank()
    state = ya.init(base_params(2), TX, mesh=mesh)
    gradient = ya.grad(base_loss)
    evaluate = ya.eval_step(base_loss)
    with record() as recording:
        for _ in range(2):
            grads = gradient(state.params, batch_of(rank))
            evaluate(state, batch_of(rank))
            state = state.apply_gradients(grads, TX)
    state = state.apply_gradients(gradient(state.params, batch_of(rank)), TX)
    timelines = list(recording.timelines)
    assert len(timelines) == 4
    for timeline in timelines:
        check(timeline, timeline.title)
    assert [any(isinstance(span.op, Update) for span in t.spans) for t in timelines] == [True, False] * 2
    assert [any(isinstance(span.op, Backward) for span in t.spans) for t in timelines] == [True, False] * 2


@on_ranks(2)
def test_spans_last_as_long_as_the_work(mesh: Mesh) -> None:
    from yafsdp_fn.communication import flat

    gather_into = flat.gather_into

    def late(*args: Any, **how: Any) -> None:
        time.sleep(0.004)
        gather_into(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "gather_into", late)
        timeline = steps_of(mesh, "zero3", "base")[0][-1]
    gathers = [span for span in timeline.spans if isinstance(span.op, Gather)]
    assert all(span.seconds >= 0.004 for span in gathers)
    first, *_ = timeline.idle()
    assert first.end - first.start >= 0.004
    assert first.cause == gathers[0].number


# ---- one rank


def small_step(**options: Any) -> tuple[Any, Any]:
    state = ya.init(small.model(), TX, mesh=small.one_rank(), **options)
    return state, ya.train_step(small.loss, TX)


def test_reductions_of_one_rank_run_on_its_compute_stream() -> None:
    state, step = small_step(precision=ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16))
    state, _ = step(state, small.batch())
    with record() as recording:
        state, _ = step(state, small.batch())
    spans = recording.timeline().spans
    check(recording.timeline(), "measured, rank 0 of 1")
    assert {span.stream for span in spans} == {"compute"}
    ran = [(k, op) for k, op in enumerate(step.program(state).ops) if not isinstance(op, Gather)]
    assert [(span.number, span.op) for span in spans[: len(ran)]] == ran
    assert sum(isinstance(op, Reduce) for _, op in ran) == small.L + 2
    assert Timeline.from_json(recording.timeline().to_json()) == recording.timeline()


def test_a_step_that_raises_is_not_recorded() -> None:
    state, step = small_step()
    broken = ya.train_step(lambda params, batch: small.loss(params, batch)._replace(total=1 / 0), TX)
    with record() as recording:
        state, _ = step(state, small.batch())
        with pytest.raises(ZeroDivisionError):
            broken(state, small.batch())
    assert len(recording.timelines) == 1
    check(recording.timeline(), "measured, rank 0 of 1")


def test_recordings_nest() -> None:
    """The outer one has all steps, and an update outside of a program goes to the step it follows."""
    state, step = small_step()
    gradient = ya.grad(small.loss)
    with record() as outer:
        state, _ = step(state, small.batch())
        with record() as inner:
            grads = gradient(state.params, small.batch())
            state = state.apply_gradients(grads, TX)
        grads = gradient(state.params, small.batch())
        with record() as last:
            state = state.apply_gradients(grads, TX)
    assert (len(outer.timelines), len(inner.timelines)) == (3, 1)
    assert outer.timelines[1] == inner.timeline()
    assert [sum(isinstance(span.op, Update) for span in t.spans) for t in outer.timelines] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        last.timeline()


def test_an_update_goes_to_the_timeline_of_the_gradient_that_it_applies() -> None:
    """Though another step, on a state that equals it, was recorded in between."""
    one, two = (small_step()[0] for _ in range(2))
    gradient = ya.grad(small.loss)
    with record() as recording:
        of_one = gradient(one.params, small.batch())
        gradient(two.params, small.batch())
        one.apply_gradients(of_one, TX)
    assert [sum(isinstance(span.op, Update) for span in t.spans) for t in recording.timelines] == [1, 0]


@pytest.mark.parametrize("inside", [False, True])
def test_threads_record_in_the_context_of_the_block(inside: bool) -> None:
    state, step = small_step()
    with record() as recording:
        run = contextvars.copy_context().run if inside else contextvars.Context().run
        thread = threading.Thread(target=run, args=(step, state, small.batch()))
        thread.start()
        thread.join()
    assert len(recording.steps) == inside


def test_errors() -> None:
    state, step = small_step()
    with record() as recording:
        step(state, small.batch())
        with pytest.raises(RuntimeError, match="the recording goes on: ask for timelines after"):
            recording.timeline()
    plain = ya.PlainState.create(small.model(), TX)
    with record() as recording:
        step(plain, small.batch())
    with pytest.raises(
        RuntimeError, match=r"nothing was recorded: no step on a sharded state .* in its thread .* PlainState"
    ):
        recording.timeline()


@on_gpu
def test_one_gpu() -> None:
    state = ya.init(small.model(), TX, mesh=ya.mesh(device="cuda"))
    step = ya.train_step(small.loss, TX)
    batch = {key: value.cuda() for key, value in small.batch().items()}
    with record() as recording:
        for _ in range(2):
            state, _ = step(state, batch)
    for timeline in recording.timelines:
        check(timeline, timeline.title)
