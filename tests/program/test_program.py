# ruff: noqa: E501  # tables are as wide as they are
"""Programs as data: text, JSON, fingerprint, sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.program.traces import cut, model, on, together
from yafsdp_fn.program.measured import Cost, Value
from yafsdp_fn.program.ops import OPS
from yafsdp_fn.program.text import describe
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Receive,
    Reduce,
    Send,
    Stash,
    Trace,
    Update,
    ddp,
    hpz,
    hsdp,
    one_f_one_b,
    remat,
    verify,
    zero1,
    zero2,
    zero3,
)

HEAD = """\
program of 16 ops: 4 visits, microbatches: 1, 4 gathers, 4 reductions; \
weight slots 4 (0.0 MiB), gradient slots 4 (0.0 MiB)
"""
TWO_LAYERS = """\
   op  gather stream           compute                                                    reduce stream
    0  gather embed -> slot 2
    1  gather a[0] -> slot 0
    2                          forward embed in slot 2, keep graph
    3  gather a[1] -> slot 1
    4                          forward a[0] in slot 0, recompute
    5  gather head -> slot 3
    6                          forward a[1] in slot 1, keep graph
    7                          forward head in slot 3, keep graph, may begin grad slot 3
    8                          backward head in slot 3 -> grad slot 3
    9                                                                                     reduce head <- grad slot 3
   10                          backward a[1] in slot 1 -> grad slot 1
   11                                                                                     reduce a[1] <- grad slot 1
   12                          backward a[0] in slot 0 -> grad slot 0
   13                                                                                     reduce a[0] <- grad slot 0
   14                          backward embed in slot 2 -> grad slot 2
   15                                                                                     reduce embed <- grad slot 2"""


def test_a_printed_program() -> None:
    program = zero3(remat=remat.first(1))(model(2))
    assert str(program) == HEAD + TWO_LAYERS


def test_microbatches_and_several_units_in_print() -> None:
    lines = str(zero3()(together(1, 2))).splitlines()
    assert lines[0].startswith("program of 7 ops: 1 visits, microbatches: 2, 2 gathers, 4 reductions")
    assert lines[2].endswith("gather a[0], b[0] -> slots 0, 2")
    assert lines[3].endswith("forward a[0]+b[0] (microbatch 0) in slots 0, 2, keep graph, may begin grad slots 0, 2")
    assert "backward a[0]+b[0] (microbatch 1) in slots 0, 2 -> grad slots 0, 2" in str(zero3()(together(1, 2)))


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Gather((1, 2), (0, 1)), "gather a[0], a[1] -> slots 0, 1"),
        (Gather((1,), (0,), "node"), "gather a[0] in node -> slot 0"),
        (Gather((1, 2), (0, 1), "node"), "gather a[0], a[1] in node -> slots 0, 1"),
        (Stash((1,), (0,)), "stash a[0] <- slot 0"),
        (Forward(1, (0,), True, 1), "forward a[0] (microbatch 1) in slot 0, keep graph"),
        (Forward(1, (0,), False), "forward a[0] (microbatch 0) in slot 0, recompute"),
        (Backward(1, (0,), (4,), 1), "backward a[0] (microbatch 1) in slot 0 -> grad slot 4"),
        (Backward(1, (0,), (), 1), "backward a[0] (microbatch 1) in slot 0"),
        (Reduce((1,), (0,)), "reduce a[0] <- grad slot 0"),
        (AllReduce((1, 2)), "all-reduce a[0], a[1]"),
        (Norm((0, 1)), "norm of 2 units"),
        (Update((4,)), "update head"),
        (Exchange((1,), 0), "lend a[0]"),
        (Exchange((1, 2), 1), "return a[0], a[1]"),
    ],
)
def test_every_op_in_words(op: Op, words: str) -> None:
    assert describe(op, model(3, 2)) == words


def test_a_part_of_an_update_in_words() -> None:
    assert describe(Update((4,), 1), on(model(3, 2), "ranks", "after norm", parts=3)) == "update head, part 1"


EVERYTHING = """\
program of 19 ops: 3 visits, microbatches: 1, 3 gathers, 3 reductions; \
weight slots 3 (0.0 MiB), gradient slots 3 (0.0 MiB)
carried over from the step before: a[0] in slot 0, embed in slot 2
   op  gather stream           compute                                                    reduce stream                replicate stream
    0                          forward embed in slot 2, keep graph
    1  gather head -> slot 3
    2                          forward a[0] in slot 0, keep graph
    3                          forward head in slot 3, keep graph, may begin grad slot 3
    4                          backward head in slot 3 -> grad slot 3
    5                                                                                     reduce head <- grad slot 3
    6                                                                                                                  all-reduce head
    7                          backward a[0] in slot 0 -> grad slot 0
    8                                                                                     reduce a[0] <- grad slot 0
    9                                                                                                                  all-reduce a[0]
   10                          backward embed in slot 2 -> grad slot 2
   11                                                                                     reduce embed <- grad slot 2
   12                                                                                                                  all-reduce embed
   13                          norm of 3 units
   14                          update embed
   15  gather embed -> slot 2
   16                          update a[0]
   17  gather a[0] -> slot 0
   18                          update head"""


def test_a_printed_program_with_replicas_updates_and_carried_slots() -> None:
    assert str(hsdp(update=True)(on(model(1), "replicas", "after norm"))) == EVERYTHING


def test_a_stream_that_nothing_uses_has_no_column() -> None:
    table = str(ddp()(on(model(1), "replicas of the whole"))).splitlines()[1]
    assert table.split() == ["op", "gather", "stream", "compute", "reduce", "stream", "replicate", "stream"]
    assert str(zero3()(model(1, backward=False))).splitlines()[1].split() == ["op", "gather", "stream", "compute"]


# ---- what a program says of itself


def test_carried_slots_are_those_that_are_read_before_a_gather() -> None:
    trace = model(2)
    forwards = [Forward(0, (5,), True), Forward(1, (0,), True)]
    assert Program(trace, tuple(forwards)).carried() == {5: 0, 0: 1}
    assert Program(trace, (Gather((0,), (5,)), *forwards)).carried() == {0: 1}
    assert Program(trace, (Stash((1,), (0,)), *forwards)).carried() == {0: 1, 5: 0}
    assert Program(trace, (*forwards, Gather((3,), (0,)), Forward(3, (0,), True))).carried() == {5: 0, 0: 1}


def test_sizes_of_slots_carried_over_and_of_secondary_shards() -> None:
    """UnitSpec u gathers 4 * (10 + u) bytes, padded for 4 ranks of which 2 share a node."""
    program = hpz(9, update=True)(on(model(3), "nodes", "after norm"))
    assert program.carried() == {2: 0, 0: 1}
    assert program.slot_bytes() == {0: 64, 1: 48, 2: 48, 3: 64}
    assert program.secondary_bytes() == {1: 24}


def test_wire_bytes_of_every_kind_of_collective() -> None:
    trace = on(model(1), (("replicate", 3), ("node", 2), ("local", 4)))  # 8 ranks: units of 16 elements
    ops = (Gather((0, 1), (0, 1)), Gather((1,), (0,), "node"), Reduce((0,), (0,)), AllReduce((0, 1)))
    assert Program(trace, ops).wire_bytes() == {
        "gather": 2 * 64 * 7 // 8,
        "gather in node": 64 * 3 // 4,
        "reduce": 128 * 7 // 8,
        "all-reduce": 2 * 2 * (128 // 8) * 2 // 3,
    }
    assert Program(trace, ops).count(Gather, "node") == 1
    assert Program(trace, ops).count(AllReduce) == 2


# ---- two programs


def test_no_difference() -> None:
    program = PROGRAMS[0]
    assert program.diff(program) == "" == program.diff(Program.from_json(program.to_json()))


def test_a_difference_in_words() -> None:
    one = zero3()(model(3))
    two = zero3(remat=remat.first(1))(model(3))
    assert one.diff(two).splitlines() == [
        "--- this",
        "+++ other",
        "@@ -3,5 +3,5 @@",
        " forward embed in slot 2, keep graph",
        " gather a[1] -> slot 1",
        "-forward a[0] in slot 0, keep graph",
        "+forward a[0] in slot 0, recompute",
        " gather a[2] -> slot 0",
        " forward a[1] in slot 1, keep graph",
    ]


def test_a_difference_between_microbatches_and_of_length() -> None:
    added = zero3()(model(1, 2)).diff(zero3()(on(model(1, 2), "replicas")))
    assert [line for line in added.splitlines() if line[0] in "+-"][2:] == [
        "+all-reduce head",
        "+all-reduce a[0]",
        "+all-reduce embed",
    ]


def measured(trace: Trace) -> Trace:
    """Each visit but the first takes the output of the one before, 1000 bytes and 10 for each visit."""
    values = [Value(k, 1000 + 10 * k, 1000) for k in range(len(trace.visits))]
    pairs = zip(trace.visits, [None, *values[:-1]], strict=True)
    visits = [v._replace(cost=Cost(takes=(x,), carries=(x.number,))) if x else v for v, x in pairs]
    return trace._replace(visits=tuple(visits))


PROGRAMS = [
    zero3()(model(3, 2, tied=True)),
    zero2(remat=remat.all)(model(2, stacks=2, frozen=True)),
    zero3(prefetch=0)(together(2)),
    zero3()(model(2, backward=False)),
    hpz(9, update=True)(on(model(3), "replicas and nodes", "after norm")),
    zero1(update=True)(on(model(2, 2), "ranks", "after norm", parts=3)),
    ddp()(on(model(2), "replicas of the whole")),
    zero3(remat=remat.offload())(measured(model(4, 2))),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_json_round_trip(program: Program) -> None:
    again = Program.from_json(program.to_json())
    assert again == program
    assert hash(again) == hash(program)
    assert [type(op) for op in again.ops] == [type(op) for op in program.ops]
    assert type(again.trace.units[0]) is type(program.trace.units[0])
    assert again.fingerprint() == program.fingerprint()
    assert str(again) == str(program)
    verify(again)


def test_a_program_of_several_stages_has_parts() -> None:
    program = one_f_one_b()(cut(model(4, 2), (0, 1)))
    assert [part.ops for part in program.by_stage] == [*program.stages]
    assert program.by_stage is program.by_stage
    assert [part.by_stage for part in program.by_stage] == [(part,) for part in program.by_stage]
    with pytest.raises(TypeError, match=r"a program of 2 stages has a list of ops for each: program\.stages\[0\]"):
        _ = program.ops
    assert str(program) == "\n\n".join(f"stage {number}: {part}" for number, part in enumerate(program.by_stage))
    assert len({program.fingerprint(), *(part.fingerprint() for part in program.by_stage)}) == 3


def test_the_programs_above_have_every_op() -> None:
    assert {type(op) for program in PROGRAMS for op in program.ops} == set(OPS) - {Send, Receive}


TEXT = PROGRAMS[0].to_json()


def test_a_fingerprint_ignores_measured_costs() -> None:
    program = PROGRAMS[0]
    trace = program.trace
    costly = [
        visit._replace(cost=Cost(flops=10**12, bwd_flops=7, kept_bytes=5, carry_bytes=3), name="x")
        for visit in trace.visits
    ]
    assert program.with_trace(trace._replace(visits=tuple(costly))).fingerprint() == program.fingerprint()


def test_a_fingerprint_sees_what_ranks_must_agree_on() -> None:
    program = PROGRAMS[0]
    trace = program.trace
    ops = program.ops
    unit = trace.units[0]
    visit = trace.visits[0]
    traces: list[dict[str, Any]] = [
        {"units": (unit._replace(numel=1), *trace.units[1:])},
        {"visits": (visit._replace(trained=()), *trace.visits[1:])},
        {"mesh": (("shard", 4),)},
        {"microbatches": 3},
        {"update_when": "after norm"},
    ]
    first = (Gather((0,), (3,)), Gather((0,), (2,), "node"), Stash((0,), (2,)))
    last = (AllReduce((0,)), Norm((0,)), Update((0,)), Offload(0, 0), Fetch(0, 0), Fetch(0, 1))
    others = [
        program.with_ops(ops[:-1]),
        program.with_ops(op._replace(keep=False) if isinstance(op, Forward) else op for op in ops),
        *(program.with_trace(trace._replace(**change)) for change in traces),
        *(program.with_ops((op, *ops[1:])) for op in first),
        *(program.with_ops((*ops, op)) for op in last),
    ]
    assert len({program.fingerprint(), *(other.fingerprint() for other in others)}) == len(others) + 1


def test_counts_are_of_units_not_of_ops() -> None:
    program = Program(model(2), (Gather((1, 2), (0, 1)), Gather((0,), (2,)), Reduce((1, 2), (0, 1))))
    assert (program.count(Gather), program.count(Reduce), program.count(Update)) == (3, 2, 0)
    for bad in ((Forward, None), (Reduce, "node")):
        with pytest.raises(TypeError, match="expected a kind of op that has units; a source for Gather"):
            program.count(*bad)
    assert program.slot_bytes() == {0: 44, 1: 48, 2: 40}
    assert program.grad_slot_bytes() == {0: 88, 1: 96}


def test_carries_take_room_in_their_slots_and_on_the_host() -> None:
    program = PROGRAMS[-1]
    assert program.carry_slot_bytes() == {0: 1024, 1: 1536}
    assert program.host_bytes() == {1: 1024, 2: 1024}
    assert "offloaded visits: 2 (0.0 MiB), carry slots 2 (0.0 MiB)" in str(program)
    assert zero3(remat=remat.offload())(model(4)).carry_slot_bytes() == {0: 0, 1: 0}  # nothing has measured them
    assert PROGRAMS[0].carry_slot_bytes() == PROGRAMS[0].host_bytes() == {}


def test_a_wrong_program_can_be_printed() -> None:
    program = Program(model(2), (Gather((9,), (0,)), Forward(9, (0,), True), Gather(0, 0)))
    assert "Gather(units=(9,), slots=(0,), source='shard')" in str(program)
    assert "Forward(visit=9" in Program(model(2), ()).diff(program)


def test_json_holds_plain_data() -> None:
    data = json.loads(TEXT)
    assert set(data) == {"version", "trace", "stages"}
    assert data["stages"][0][0] == ["gather", [0], [2], "shard"]
    fields = {
        "units",
        "visits",
        "order",
        "mesh",
        "microbatches",
        "update_when",
        "precision",
        "optimizer",
        "lent",
        "ordered",
        "split",
        "stage",
        "loss_of",
        "between",
        "kernels",
    }
    assert set(data["trace"]) == fields


def test_a_trace_is_a_table() -> None:
    """Of many visits the first and the last, on one screen."""
    for trace in (model(3, 2), model(100, 4, tied=True), cut(model(6), (0, 1)), model(2, backward=False)):
        first, head, *rows = str(trace).splitlines()
        what = "a training step" if trace.trains else "an evaluation"
        mesh = "stage=2, shard=2" if trace.split is not None else "shard=2"
        assert first.startswith(f"trace of {what} on the mesh ({mesh}): {len(trace.units)} units, ")
        assert len(rows) < 23
        assert head.split()[:3] == ["visit", "units", "trained"]
        assert rows[0].split()[:3] == ["0", "embed", "0"]
        assert rows[1].split()[:2] == ["1", "a[0]"]
        assert rows[-2].startswith("order: forward 0")
        assert f"; {len(trace.order)} computes" in rows[-2]
        assert repr(trace) == f"Trace({first})"
