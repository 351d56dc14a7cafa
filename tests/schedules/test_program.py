"""Programs as data: text, JSON, fingerprint, sizes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedules.traces import model, together
from yafsdp_fn.schedules import Forward, Gather, Program, Reduce, remat, verify, zero2, zero3
from yafsdp_fn.schedules.program import describe

HEAD = """\
program of 16 ops: 4 visits, microbatches: 1, 4 gathers, 4 reductions; \
weight slots 4 (0.0 MiB), gradient slots 4 (0.0 MiB)
"""
TWO_LAYERS = """\
   op  gather stream           compute                                  reduce stream
    0  gather embed -> slot 2
    1  gather a[0] -> slot 0
    2                          forward embed in slot 2, keep graph
    3  gather a[1] -> slot 1
    4                          forward a[0] in slot 0, recompute
    5  gather head -> slot 3
    6                          forward a[1] in slot 1, keep graph
    7                          forward head in slot 3, keep graph
    8                          backward head in slot 3 -> grad slot 3
    9                                                                   reduce head <- grad slot 3
   10                          backward a[1] in slot 1 -> grad slot 1
   11                                                                   reduce a[1] <- grad slot 1
   12                          backward a[0] in slot 0 -> grad slot 0
   13                                                                   reduce a[0] <- grad slot 0
   14                          backward embed in slot 2 -> grad slot 2
   15                                                                   reduce embed <- grad slot 2"""


def test_a_printed_program() -> None:
    program = zero3(remat=remat.first(1))(model(2))
    assert str(program) == HEAD + TWO_LAYERS


def test_microbatches_and_several_units_in_print() -> None:
    lines = str(zero3()(together(1, 2))).splitlines()
    assert lines[0].startswith("program of 10 ops: 1 visits, microbatches: 2, 2 gathers, 4 reductions")
    assert lines[4].endswith("forward a[0]+b[0] (microbatch 0) in slots 0, 2, keep graph")
    assert "backward a[0]+b[0] (microbatch 1) in slots 0, 2 -> grad slots 0, 2" in str(zero3()(together(1, 2)))


def test_ops_of_several_units_in_words() -> None:
    trace = model(3)
    assert describe(Gather((1, 2), (0, 1)), trace) == "gather a[0], a[1] -> slots 0, 1"
    assert describe(Reduce((1,), (0,)), trace) == "reduce a[0] <- grad slot 0"
    assert describe(Forward(1, (0,), False), trace, 1) == "forward a[0] in slot 0, recompute"


PROGRAMS = [
    zero3()(model(3, 2, tied=True)),
    zero2(remat=remat.all)(model(2, stacks=2, frozen=True)),
    zero3(prefetch=0)(together(2)),
    zero3()(model(2, backward=False)),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_json_round_trip(program: Program) -> None:
    again = Program.from_json(program.to_json())
    assert again == program and hash(again) == hash(program)
    assert [type(op) for op in again.ops] == [type(op) for op in program.ops]
    assert type(again.trace.units[0]) is type(program.trace.units[0])
    assert again.fingerprint() == program.fingerprint() and str(again) == str(program)
    verify(again)


TEXT = PROGRAMS[0].to_json()


@given(st.integers(0, len(TEXT) - 1))
def test_truncated_json_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="not a program in JSON"):
        Program.from_json(TEXT[:length])


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "{}",
        '"program"',
        '{"trace": {}, "ops": []}',
        TEXT.replace('"gather"', '"scatter"', 1),
        TEXT.replace('"units"', '"unit"', 1),
        TEXT.replace('["gather", [0], [2]]', '["gather", [0]]', 1),
    ],
)
def test_other_json_is_refused(text: str) -> None:
    assert text != TEXT
    with pytest.raises(ValueError, match="not a program in JSON"):
        Program.from_json(text)


def test_a_fingerprint_ignores_measured_costs() -> None:
    program = PROGRAMS[0]
    trace = program.trace
    costly = [
        visit._replace(flops=10**12, bwd_flops=7, kept_bytes=5, carry_bytes=3, name="x") for visit in trace.visits
    ]
    assert program._replace(trace=trace._replace(visits=tuple(costly))).fingerprint() == program.fingerprint()


def test_a_fingerprint_sees_what_ranks_must_agree_on() -> None:
    program = PROGRAMS[0]
    trace = program.trace
    small = trace.units[0]._replace(numel=1)
    one = trace.visits[0]
    others = [
        program._replace(ops=program.ops[:-1]),
        program._replace(ops=(Gather((0,), (3,)), *program.ops[1:])),
        program._replace(ops=tuple(op._replace(keep=False) if isinstance(op, Forward) else op for op in program.ops)),
        program._replace(trace=trace._replace(units=(small, *trace.units[1:]))),
        program._replace(trace=trace._replace(visits=(one._replace(trained=()), *trace.visits[1:]))),
        program._replace(trace=trace._replace(mesh=(("shard", 4),))),
        program._replace(trace=trace._replace(microbatches=3)),
    ]
    assert len({program.fingerprint(), *(other.fingerprint() for other in others)}) == len(others) + 1


def test_counts_are_of_units_not_of_ops() -> None:
    program = Program(model(2), (Gather((1, 2), (0, 1)), Gather((0,), (2,)), Reduce((1, 2), (0, 1))))
    assert (program.count(Gather), program.count(Reduce), program.count(Forward)) == (3, 2, 0)
    assert program.slot_bytes() == {0: 44, 1: 48, 2: 40}
    assert program.grad_slot_bytes() == {0: 88, 1: 96}


def test_json_holds_plain_data() -> None:
    data = json.loads(TEXT)
    assert set(data) == {"trace", "ops"} and data["ops"][0] == ["gather", [0], [2]]
    assert set(data["trace"]) == {"units", "visits", "order", "mesh", "microbatches"}
