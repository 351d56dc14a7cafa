"""Pipelines of every order and sharding: proved, exact on the oracle, and as long as the textbooks say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.harness.marks import nightly
from tests.pipelines.orders import ORDERS, SHARDINGS, homes, whole
from tests.planner.bubbles import split_of
from tests.program.traces import cut, model, on
from tests.proof.overlapped import right
from tests.schedules.cases import EVERY
from yafsdp_fn.interop.actions import KINDS
from yafsdp_fn.pipelines import orders
from yafsdp_fn.pipelines.messages import SPAN, UNIT, times, with_messages
from yafsdp_fn.pipelines.orders import FACTORIES, V_SHAPED
from yafsdp_fn.proof.stages import all_end
from yafsdp_fn.schedules import (
    Backward,
    Call,
    Forward,
    Gather,
    Program,
    Receive,
    Reduce,
    Refused,
    Split,
    Trace,
    fsdp2,
    gpipe,
    one_f_one_b,
    remat,
    staged,
    verify,
    zero1,
    zero2,
    zero3,
)


def split(order: str, stages: int) -> Split:
    return split_of(stages, 2 if order == "interleaved" else 1, v=order in V_SHAPED)


def length(of: Split, rows: Sequence[Sequence[Call]]) -> float:
    """Units of time that a step takes, with messages that take none."""
    begins = times(of, with_messages(of, rows), UNIT).begins
    return max(begun[-1] + SPAN[row[-1].kind] for begun, row in zip(begins, rows, strict=True))


# ---- orders


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_order_can_run_with_any_number_of_microbatches(stages: int) -> None:
    for order, microbatches in itertools.product(ORDERS, range(1, 3 * stages + 2)):
        of = split(order, stages)
        rows = orders.ORDERS[order](of, microbatches)
        assert length(of, rows) >= 3 * microbatches
        assert length(of, orders.forward_only(of, microbatches)) >= microbatches


def under_way(row: Sequence[Call]) -> int:
    """The most microbatches of segments that a stage keeps at once."""
    most = now = 0
    for call in row:
        now += (call.kind == "forward") - (call.kind in ("backward", "weights"))
        most = max(most, now)
    return most


def test_what_orders_keep() -> None:
    P, M = 4, 12
    one = split("one_f_one_b", P)
    assert [under_way(row) for row in orders.gpipe_calls(one, M)] == [M] * P
    assert [under_way(row) for row in orders.one_f_one_b_calls(one, M)] == [4, 3, 2, 1]
    assert [under_way(row) for row in orders.zero_bubble_calls(one, M)] == [4] * P
    assert [under_way(row) for row in orders.v_shaped_calls(split("v_shaped", P), M)] == [2 * P] * P


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 12])
def test_v_shapes_of_less_memory(stages: int) -> None:
    """What Qi et al. (2024) give for them: a half and a third of the microbatches, and two thirds of the idle time."""
    of = split("v_min", stages)
    M = 3 * stages
    for order, most, idle in (
        (orders.v_half_calls, (stages + 2) // 2, 0.6),
        (orders.v_min_calls, (stages + 4) // 3, 2 / 3),
    ):
        rows = order(of, M)
        assert max(map(under_way, rows)) == 2 * most
        assert length(of, rows) / 2 <= 3 * M + 3 * idle * (stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, nightly(8)])
def test_what_interleaved_keeps(stages: int) -> None:
    """As docs/schedules.md has it: P + (P - 1) / v microbatches where P divides M, at most 2 P - 1 else."""
    P = stages
    for v, M in itertools.product((2, 3, 4), range(1, 4 * P + 1)):
        of = split_of(P, v)
        rows = orders.interleaved_calls(of, M)
        G = -(-M // max(1, M // P))
        segments = max(map(under_way, rows))
        assert segments == min(v * M, v * G + 2 * P - 1 - G)
        assert segments == v * P + P - 1 if M >= 2 * P and M % P == 0 else segments <= v * (2 * P - 1)
        assert M < P or length(of, rows) == 3 * v * M + 3 * (P - 1)


def test_halves_are_one_where_nothing_waits_for_the_first() -> None:
    rows = orders.zero_bubble_calls(split("zero_bubble", 3), 4)
    assert {call.kind for call in rows[0]} == {"forward", "backward"}
    assert {call.kind for call in rows[1]} == {"forward", "inputs", "weights"}


# ---- pipelines


@pytest.mark.parametrize("seed", range(400 if EVERY else 30))
def test_flows_between_any_segments_are_proved(seed: int) -> None:
    """Skip connections everywhere: many messages at one time, in both directions."""
    rng = random.Random(seed)
    order = rng.choice(ORDERS)
    stages = rng.randint(2, 5)
    places = homes(order, stages)
    trace = model(len(places) - 2, rng.randint(1, 2 * stages + 2)) if len(places) > 2 else model(1, 3)
    pairs = itertools.combinations(range(len(places)), 2)
    skips = [pair for pair in pairs if pair[1] - pair[0] > 1 and rng.random() < 0.4]
    sharding, _, when = rng.choice([how for how in SHARDINGS.values() if how[1] == "ranks"])
    verify(FACTORIES[order](sharding)(cut(on(trace, "ranks", when), places, skips)))


@pytest.mark.parametrize("each", [10, nightly(1)])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_with_every_sharding_is_exact(order: str, each: int) -> None:
    """each: one of so many"""
    counts = [(P, M) for P in (2, 3, 4) for M in (1, P, 2 * P + 1)]
    for number, ((P, M), sharding) in enumerate(itertools.product(counts, SHARDINGS)):
        if number % each:
            continue
        schedule, mesh, updates = SHARDINGS[sharding]
        pipeline = verify(FACTORIES[order](schedule)(whole(order, P, M, mesh=mesh, updates=updates)))
        if number % 25 == 0:
            assert right(pipeline, number), (P, M, sharding)


@pytest.mark.parametrize("each", [10, nightly(1)])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_with_every_setting_of_fsdp2_is_exact(order: str, each: int) -> None:
    """72, of which one of so many. A group has the embedding and the head, whose microbatches come by turns where both
    are on one stage."""
    cases = (2, 3), (3, 7), (4, 2)
    settings = itertools.product((True, False), ("layers", "all"), (None, 0, 2), (False, True), cases)
    for number, (reshard, wrap, prefetch, defer, (P, M)) in enumerate(settings):
        if number % each:
            continue
        remat = ("none", "all")[number % 2]
        mesh = ("ranks", "replicas")[number // 2 % 2]
        sharding = fsdp2(reshard_after_forward=reshard, wrap=wrap, prefetch=prefetch, defer=defer, remat=remat)
        pipeline = verify(FACTORIES[order](sharding)(whole(order, P, M, mesh=mesh)))
        if number % 30 == 0:
            assert right(pipeline, number), (reshard, wrap, prefetch, defer, P, M)


@pytest.mark.parametrize("order", ORDERS)
def test_json_and_an_evaluation(order: str) -> None:
    pipeline = FACTORIES[order]()(whole(order, 2, 3))
    assert Program.from_json(pipeline.to_json()) == pipeline
    evaluation = verify(FACTORIES[order]()(cut(model(5, 3, backward=False), homes(order, 2))))
    assert right(evaluation)
    assert all(op.stream != "reduce" for program in evaluation.by_stage for op in program.ops)


def test_what_sharding_decides_on_a_stage() -> None:
    M = 4
    trace = cut(model(8, M), (0, 1))
    units = [sum(unit.numel > 0 for unit in program.trace.units) for program in one_f_one_b()(trace).by_stage]
    assert sum(units) == len(trace.units)

    def counts(pipeline: Program) -> list[tuple[int, int]]:
        return [(program.count(Gather), program.count(Reduce)) for program in pipeline.by_stage]

    assert counts(one_f_one_b()(trace)) == [(n, n * M) for n in units]  # gathered once, reduced every microbatch
    assert counts(one_f_one_b(zero1())(trace)) == [(n, n) for n in units]
    regathered = counts(one_f_one_b(zero3(prefetch=0))(trace))
    assert all(gathers > n for (gathers, _), n in zip(regathered, units, strict=True))


@pytest.mark.parametrize("stages", [nightly(2), 3, nightly(4)])
@pytest.mark.parametrize("order", ORDERS)
def test_every_pipeline_ends_though_hosts_wait_for_their_devices(order: str, stages: int) -> None:
    """Before all but messages. Receives that were a call ahead of what they take hung most of these."""
    for M in (1, stages, 2 * stages + 1):
        for builder, again in itertools.product((zero1, zero2, zero3), (remat.none, remat.all)):
            verify(FACTORIES[order](builder(remat=again))(whole(order, stages, M)))
            updated = builder(remat=again, update=True)
            all_end(FACTORIES[order](updated)(whole(order, stages, M, updates="after norm")))


def test_weights_do_not_wait_for_a_message() -> None:
    """Communication begins in the order in which it was issued: while a pipeline fills, what the first compute needs is
    gathered before a receive that waits."""
    for program in gpipe(zero3())(cut(model(6, 4), (0, 1, 2))).by_stage[1:]:
        kinds = [type(op) for op in program.ops[: [*map(type, program.ops)].index(Forward)]]
        assert kinds == [Gather, Gather, Receive, Receive]


def test_messages_are_a_call_ahead_and_slots_are_few() -> None:
    pipeline = one_f_one_b()(cut(model(6, 16), (0, 1, 2, 3)))
    assert all(len(program.carry_slot_bytes()) <= 8 for program in pipeline.by_stage)
    program = pipeline.by_stage[1]
    computes = 0
    received: dict[int, int] = {}
    for op in program.ops:
        if isinstance(op, Receive):
            received[op.carry_slot] = computes
        elif isinstance(op, Forward | Backward):
            if op.microbatch > 4 and isinstance(op, Forward):
                assert all(received[slot] < computes for slot in op.takes)
            computes += 1
    sizes = set(program.carry_slot_bytes().values())
    assert sizes == {64, 32}  # values and gradients are in different slots


# ---- what does not fit


@pytest.mark.parametrize("order", ORDERS)
def test_without_stages(order: str) -> None:
    with pytest.raises(ValueError, match=r"for pipeline stages, and the step has none: .*ya.mesh\(stage=2\)"):
        FACTORIES[order]()(model(2))


@pytest.mark.parametrize(
    ("order", "places", "message"),
    [
        ("one_f_one_b", (0, 1, 0, 1), r"one_f_one_b: its segments are on stages 0 1, here they are on 0 1 0 1"),
        ("v_shaped", (0, 1, 0, 1), r"are on stages 0 1 1 0, here .* assign\(trace, stages, per_stage=2, shape='v'\)"),
        ("interleaved", (0, 1, 1, 0), r"are on stages 0 1 0 1, .* assign\(trace, stages, per_stage=2\)"),
    ],
)
def test_segments_that_lie_otherwise(order: str, places: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FACTORIES[order]()(cut(model(6, 2), places))


def test_bad_arguments() -> None:
    trace = cut(model(4, 2), (0, 1))
    for factory in (zero2, fsdp2):
        with pytest.raises(TypeError, match=r"that is the factory; call it: sharding=ya.schedules.\w+2\(\)"):
            gpipe(factory)
    with pytest.raises(TypeError, match="sharding='zero2': expected a schedule"):
        gpipe("zero2")
    with pytest.raises(TypeError, match="sharding: expected a Program of the stage's trace, got NoneType"):
        gpipe(lambda part: None)(trace)
    with pytest.raises(ValueError, match=r"remat.offload: a pipeline stage has several microbatches under way"):
        gpipe(zero3(remat=remat.offload()))(trace)


def rows(*given: str) -> list[list[Call]]:
    return [[Call(KINDS[word[1]], int(word[0]), int(word[2:])) for word in row.split()] for row in given]


@pytest.mark.parametrize(
    ("given", "rule", "message"),
    [
        (("0F0 0B0 0F1", "1F0 1B0 1F1 1B1"), "calls", "stage 0: rule 'calls': no backward of segment 0, microbatch 1"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 0B1"), "calls", "stage 1: call 3 .* segment 0 is on stage 0"),
        (("0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1"), "calls", "no forward of segment 0, microbatch 1 before it"),
        (("0F0 0I0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"), "calls", "after backward of inputs .* is the same gradient"),
        (("0F0 0B0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"), "calls", "after backward of segment 0, .* is the same gradient"),
        (("0F0 0W0 0F1 0B1", "1F0 1B0 1F1 1B1"), "calls", "no backward of inputs of segment 0, microbatch 0 before it"),
        (("0F0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"), "calls", "no backward of weights of segment 0, microbatch 0$"),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "deadlock",
            "calls wait for each other\n    stage 0 waits at backward",
        ),
    ],
)
def test_calls_that_are_no_step(given: tuple[str, ...], rule: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        staged(lambda split, microbatches: rows(*given))(cut(model(4, 2), (0, 1)))
    assert refused.value.rule == rule


def test_an_order_that_returns_nothing() -> None:
    with pytest.raises(
        TypeError, match="staged: the order returned None, expected a list with a row of calls for each"
    ):
        staged(lambda split, microbatches: None)(cut(model(4, 2), (0, 1)))


def test_a_sharding_of_ones_own_is_proved_like_any() -> None:
    def careless(part: Trace) -> Program:
        program = zero2()(part)
        return program.with_ops(tuple(op for op in program.ops if not isinstance(op, Reduce)))

    with pytest.raises(Refused, match=r"stage 0: end of program: rule 'once'") as refused:
        verify(one_f_one_b(careless)(cut(model(4, 2), (0, 1))))
    assert (refused.value.stage, refused.value.rule) == (0, "once")
