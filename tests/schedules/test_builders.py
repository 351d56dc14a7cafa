"""Where the schedules put gathers, reductions and updates, and their slots; `verify` accepts all that they build.

How many gathers and reductions there are is in test_closed_forms.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.program.traces import model, on, together
from yafsdp_fn.schedules import (
    Backward,
    Forward,
    Gather,
    Norm,
    Program,
    Reduce,
    Schedule,
    alternating_slots,
    ddp,
    fsdp2,
    hpz,
    hsdp,
    verify,
    zero1,
    zero2,
    zero3,
)

DEPTHS = (1, 2, 3, 4, 7)


def reduced(program: Program) -> list[int]:
    """The units of its reductions, in their order."""
    return [unit for op in program.ops if isinstance(op, Reduce) for unit in op.units]


@pytest.mark.parametrize("L", DEPTHS)
def test_a_forward_alone_gathers_each_unit_once(L: int) -> None:
    program = zero3()(model(L, backward=False))
    assert program.count(Gather) == L + 2
    assert program.count(Reduce) == 0


@pytest.mark.parametrize("resident", range(9))
def test_residence_moves_from_zero3_to_zero2(resident: int) -> None:
    L = 6
    program = zero3(resident=resident)(model(L, 2))
    alternating = max(0, L - resident)
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
            assert isinstance(compute, Forward | Backward)
            assert gather.slots[0] in compute.slots


def test_slots_are_as_large_as_the_largest_unit_in_them() -> None:
    program = zero3()(model(3))  # units embed 0, layers 1, 2, 3, head 4; unit u gathers 4 * (10 + u) bytes
    slot = {i: s for op in program.ops if isinstance(op, Gather) for i, s in zip(op.units, op.slots, strict=True)}
    assert slot[1] == slot[3] != slot[2]
    assert slot[0] != slot[4]
    sizes = program.slot_bytes()
    assert {i: sizes[slot[i]] for i in range(5)} == {0: 40, 1: 52, 2: 48, 3: 52, 4: 56}
    assert sorted(program.grad_slot_bytes().values()) == [80, 96, 104, 112]


def test_a_tied_gradient_is_reduced_once_a_microbatch() -> None:
    program = zero3()(model(3, 2, tied=True))
    assert reduced(program).count(0) == 2
    assert isinstance(program.ops[-1], Reduce)
    assert program.ops[-1].units == (0,)


def test_a_shared_slot_is_reduced_before_another_gradient_arrives() -> None:
    program = verify(zero3()(model(3, twice=True)))  # each layer is visited twice, far apart
    # layers 1 and 3 share a gradient slot; layer 2 has the other one for itself, and adds up there
    assert [reduced(program).count(i) for i in (1, 2, 3)] == [2, 1, 2]


def test_units_of_one_visit_are_in_different_slots() -> None:
    trace = together(4)
    slots = alternating_slots(trace.visits, trace.units)
    assert len(set(slots.values())) == 4
    assert all(len({slots[i] for i in visit.units}) == 2 for visit in trace.visits)


@pytest.mark.parametrize("L", DEPTHS)
def test_slots_of_layers_are_two_in_turn_or_one_each(L: int) -> None:
    """Of weights, and of gradients, which take one each where they stay until the last microbatch."""
    made = {schedule: schedule(model(L, 3)) for schedule in (zero3(), zero3(defer=True), zero2(), zero1())}
    two = min(L, 2)
    assert [len(program.slot_bytes()) - 2 for program in made.values()] == [two, two, L, L]
    assert [len(program.grad_slot_bytes()) - 2 for program in made.values()] == [two, L, two, L]


# ---- the optimizer in the program


def test_with_a_norm_the_next_gathers_overlap_with_the_rest_of_the_update() -> None:
    program = zero3(update=True, prefetch=2)(on(model(4), "ranks", "after norm"))
    norm = next(index for index, op in enumerate(program.ops) if isinstance(op, Norm))
    assert program.ops[norm] == Norm((0, 1, 2, 3, 4, 5))
    assert program.words()[norm + 1 :] == [
        "update embed",
        "gather embed -> slot 3",
        "update a[0]",
        "gather a[0] -> slot 0",
        "update a[1]",
        "gather a[1] -> slot 1",
        "update a[2]",
        "update a[3]",
        "update head",
    ]
    assert program.carried() == {3: 0, 0: 1, 1: 2}


def test_frozen_units_stay_where_they_are_from_step_to_step() -> None:
    trace = model(3, stacks=2, frozen=True)
    assert zero2()(trace).carried() == {1: 1, 2: 2, 3: 3}
    # the first two, which the backward leaves in the slots that they share with others
    assert zero3()(trace).carried() == zero3(resident=3)(trace).carried() == {0: 1, 1: 2}
    assert set(zero3(resident=9)(trace).carried().values()) == {1, 2, 3}


def test_an_optimizer_is_needed_for_updates() -> None:
    for factory in (zero1, zero2, zero3):
        with pytest.raises(ValueError, match=r"update=True: this step has no optimizer .* ya.train_step"):
            factory(update=True)(model(2))
        assert not factory(update=True)(model(2, backward=False)).has_updates  # an evaluation has nothing to update


# ---- every builder on every model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zero3(resident=-1), r"zero3\(resident=-1\)"),
        (lambda: zero3(prefetch=1.5), r"zero3\(prefetch=1.5\)"),
        (lambda: zero3(resident=1.5), r"zero3\(resident=1.5\)"),
        (lambda: zero2(prefetch=-2), r"zero2\(prefetch=-2\)"),
        (lambda: zero1(prefetch=-2), r"zero1\(prefetch=-2\)"),
        (lambda: hpz(-1), r"hpz\(layers=-1\)"),
        (lambda: hpz(None), r"hpz\(layers=None\): expected an integer >= 0"),
        (lambda: hsdp(prefetch=-1), r"\(prefetch=-1\)"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "mesh", "message"),
    [
        (
            ddp(),
            "ranks",
            r"ddp: .* cut into 2 shards \(mesh \(shard=2\)\).* ya.mesh\(replicate=-1, shard=1\).* zero1\(\)",
        ),
        (
            hsdp(),
            "nodes",
            r"hsdp: .* \(node=2, local=2\) has no replicas.* ya.mesh\(replicate=2, shard=-1\).* zero3\(\)",
        ),
        (hpz(1), "replicas", r"hpz: .* \(replicate=2, shard=2\) does not tell nodes apart.* ya.mesh\(local=8\)"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(schedule: Schedule, mesh: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(on(model(2), mesh))


@pytest.mark.parametrize("factory", [zero3, zero1, fsdp2])
def test_a_unit_may_have_no_gradient_in_some_microbatch(factory: Callable[[], Schedule]) -> None:
    trace = on(model(2, 2), "ranks")
    gone = next(at for at, now in enumerate(trace.order) if now.kind == "backward" and now.visit == 1)
    verify(factory()(trace._replace(order=trace.order[:gone] + trace.order[gone + 1 :])))
