"""What the schedules cost, exactly: gathers, reductions, slots; and that `verify` accepts all that they build."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.schedules.reference import expected, run
from tests.schedules.traces import layers, model, together, trace_of, unit
from yafsdp_fn.schedules import Forward, Gather, Program, Reduce, Trace, alternating_slots, remat, verify, zero2, zero3
from yafsdp_fn.schedules.program import Backward

DEPTHS = (1, 2, 3, 4, 7)


def of_layers(program: Program, kind: type[Any]) -> int:
    """Gathers or reductions of layers of stacks."""
    units = program.trace.units
    return sum(units[i].stack is not None for op in program.ops if type(op) is kind for i in op.units)


@pytest.mark.parametrize("L", DEPTHS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_two_slots_take_max_L_2L_minus_2_gathers(L: int, prefetch: int) -> None:
    program = zero3(prefetch=prefetch)(model(L))
    assert of_layers(program, Gather) == max(L, 2 * L - 2)
    assert program.count(Gather) == max(L, 2 * L - 2) + 2  # embed and head once, in slots of their own
    assert program.count(Reduce) == L + 2


@pytest.mark.parametrize("L", DEPTHS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_later_microbatches_find_the_first_two_layers_in_their_slots(L: int, parts: int) -> None:
    program = zero3()(model(L, parts))
    assert of_layers(program, Gather) == max(L, 2 * L - 2) + (parts - 1) * max(0, 2 * L - 4)
    assert program.count(Reduce) == (L + 2) * parts


@pytest.mark.parametrize("L", DEPTHS)
@pytest.mark.parametrize("parts", [1, 3])
def test_zero2_gathers_each_unit_once_a_step(L: int, parts: int) -> None:
    program = zero2()(model(L, parts))
    assert program.count(Gather) == L + 2
    assert program.count(Reduce) == (L + 2) * parts
    assert len(program.slot_bytes()) == L + 2
    assert len(program.grad_slot_bytes()) == min(L, 2) + 2


@pytest.mark.parametrize("L", DEPTHS)
def test_a_forward_alone_gathers_each_unit_once(L: int) -> None:
    program = zero3()(model(L, backward=False))
    assert program.count(Gather) == L + 2 and program.count(Reduce) == 0


@pytest.mark.parametrize("resident", range(9))
def test_residence_moves_from_zero3_to_zero2(resident: int) -> None:
    L, parts = 6, 2
    program = zero3(resident=resident)(model(L, parts))
    alternating = max(0, L - resident)
    per_step = max(alternating, 2 * alternating - 2) + (parts - 1) * max(0, 2 * alternating - 4)
    assert of_layers(program, Gather) == per_step + min(resident, L)
    assert len(program.slot_bytes()) == min(alternating, 2) + min(resident, L) + 2


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_gathers_are_issued_so_many_computes_ahead(prefetch: int) -> None:
    program = zero3(prefetch=prefetch)(model(8))
    assert len(program.slot_bytes()) == max(2, prefetch + 1) + 2
    computes = [i for i, op in enumerate(program.ops) if not isinstance(op, Gather | Reduce)]
    first = program.ops.index(Forward(5, program.ops[computes[5]].slots, True))
    gathered = next(i for i, op in enumerate(program.ops) if isinstance(op, Gather) and 5 in op.units)
    between = [i for i in computes if gathered < i < first]
    assert len(between) == prefetch


def test_without_prefetch_a_gather_stands_right_before_its_compute() -> None:
    ops = zero3(prefetch=0)(model(4)).ops
    for gather, compute in itertools.pairwise(ops):
        if isinstance(gather, Gather):
            assert isinstance(compute, Forward | Backward) and gather.slots[0] in compute.slots


def test_slots_are_as_large_as_the_largest_unit_in_them() -> None:
    program = zero3()(model(3))  # units embed 0, layers 1, 2, 3, head 4; unit u gathers 4 * (10 + u) bytes
    slot = {i: s for op in program.ops if isinstance(op, Gather) for i, s in zip(op.units, op.slots, strict=True)}
    assert slot[1] == slot[3] != slot[2] and slot[0] != slot[4]
    sizes = program.slot_bytes()
    assert {i: sizes[slot[i]] for i in range(5)} == {0: 40, 1: 52, 2: 48, 3: 52, 4: 56}
    assert sorted(program.grad_slot_bytes().values()) == [80, 96, 104, 112]


def test_a_tied_gradient_is_reduced_once_a_microbatch() -> None:
    program = zero3()(model(3, 2, tied=True))
    reduced = [i for op in program.ops if isinstance(op, Reduce) for i in op.units]
    assert reduced.count(0) == 2
    assert isinstance(program.ops[-1], Reduce) and program.ops[-1].units == (0,)


def test_a_shared_slot_is_reduced_before_another_gradient_arrives() -> None:
    program = verify(zero3()(model(3, twice=True)))  # each layer is visited twice, far apart
    reduced = [i for op in program.ops if isinstance(op, Reduce) for i in op.units]
    # layers 1 and 3 share a gradient slot; layer 2 has the other one for itself, and adds up there
    assert [reduced.count(i) for i in (1, 2, 3)] == [2, 1, 2]


def test_frozen_units_are_gathered_and_never_reduced() -> None:
    program = zero3()(model(3, stacks=2, frozen=True))
    reduced = {i for op in program.ops if isinstance(op, Reduce) for i in op.units}
    assert reduced == {unit.id for unit in program.trace.units if unit.trainable}


def test_units_of_one_visit_are_in_different_slots() -> None:
    trace = together(4)
    slots = alternating_slots(trace.visits, trace.units)
    assert len(set(slots.values())) == 4
    assert all(len({slots[i] for i in visit.units}) == 2 for visit in trace.visits)


SCHEDULES = [
    *(
        zero3(resident=resident, prefetch=prefetch, remat=policy)
        for resident in (0, 1, 9)
        for prefetch in (0, 1, 3)
        for policy in (remat.none, remat.first(1), remat.all)
    ),
    *(zero2(prefetch=prefetch, remat=remat.every(2)) for prefetch in (0, 2)),
]
MODELS: list[Trace] = [
    model(L, parts, stacks=stacks, unroll=unroll, tied=tied)
    for L in (1, 2, 5)
    for parts in (1, 3)
    for stacks in (1, 2)
    for unroll in (1, 2)
    for tied in (False, True)
]


def test_verify_accepts_all_that_the_factories_build_and_the_result_is_right() -> None:
    others = [together(3, 2), together(4, alternating=True), model(4, 2, twice=True), model(3, stacks=2, frozen=True)]
    others += [
        model(3, backward=False),
        trace_of([unit(0, "a")], [[0]] * 3, 2),
        trace_of(layers("a", 3, 0), [[0, 1, 2]]),
    ]
    for trace in [*MODELS, *others]:
        right = expected(trace)
        for number, schedule in enumerate(SCHEDULES):
            program = verify(schedule(trace))
            if number % 5 == 0:
                assert run(program) == right
            assert program.count(Gather) >= len(trace.units)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stacks_may_be_scanned_in_several_pairings(count: int) -> None:
    a, b, c = (layers(name, count, k * count) for k, name in enumerate("abc"))
    pairs = [[x.id, y.id] for left, right in ((a, b), (b, c), (c, a)) for x, y in zip(left, right, strict=True)]
    for schedule in SCHEDULES:
        verify(schedule(trace_of([*a, *b, *c], pairs)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zero3(resident=-1), r"zero3\(resident=-1\)"),
        (lambda: zero3(prefetch=1.5), r"zero3\(prefetch=1.5\)"),
        (lambda: zero2(prefetch=-2), r"zero2\(prefetch=-2\)"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
