"""The rules that stages have together: what each refuses, by name, and how the refusal is drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from tests.program.traces import cut, model, on, trace_of, unit
from tests.proof.listed import refusal
from tests.proof.overlapped import account, constraints, drawn, goes_wrong, right, waits_of
from tests.proof.reference import SHARDED
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Flow,
    Forward,
    Norm,
    Op,
    Program,
    Receive,
    Refused,
    Send,
    Trace,
    Update,
    UpdateWhen,
    from_actions,
    one_f_one_b,
    verify,
    zero1,
    zero2,
    zero3,
    zero_bubble,
)

WHOLE = cut(model(4, 3), (0, 1))
PLAIN = one_f_one_b(zero1())(WHOLE)
Edit = Callable[[list[Op]], object]


def edited(stage: int, edit: Edit, pipeline: Program = PLAIN) -> Program:
    ops = list(pipeline.stages[stage])
    edit(ops)
    return pipeline.with_ops(ops, stage)


def check(pipeline: Program, stage: int, rule: str, message: str) -> Refused:
    refused = refusal(pipeline)
    assert (refused.stage, refused.rule) == (stage, rule), refused
    assert re.search(message, str(refused)), refused
    return refused


def index(stage: int, kind: type[Op], number: int, pipeline: Program = PLAIN) -> int:
    """Where the `number`-th op of a kind is in a stage's list."""
    return [at for at, op in enumerate(pipeline.stages[stage]) if isinstance(op, kind)][number]


def swap(a: int, b: int) -> Edit:
    def edit(ops: list[Op]) -> None:
        ops[a], ops[b] = ops[b], ops[a]

    return edit


def test_a_right_pipeline_comes_back() -> None:
    assert verify(PLAIN) is PLAIN
    assert verify(PLAIN.by_stage[0]) is PLAIN.by_stage[0]
    with pytest.raises(TypeError, match="expected a Program"):
        verify(WHOLE)


def test_stages() -> None:
    """A stage's part follows from its ops: what can be wrong is how many there are, and the split."""
    first, second = PLAIN.stages
    assert "rule 'stages': the step is cut into 2 stages, and needs ops for each, not 1 lists" in str(
        refusal(Program(WHOLE, first))
    )
    check(Program(WHOLE, second, first), 0, "calls", "segment 1 is on stage 1")
    for stages in ((), (first, second)):
        assert refusal(Program(model(2), *stages)).rule == "stages"


def test_shared() -> None:
    """A tied embedding on two stages: its gradient is summed between them, by both, once, when it is complete."""
    trace = cut(on(model(4, 2, tied=True), "replicas", "after norm"), (0, 1))
    tied = verify(one_f_one_b(zero2(update=True))(trace))
    assert right(tied)
    at = [next(k for k, op in enumerate(p.ops) if op == AllReduce((0,), "stages")) for p in tied.by_stage]
    alone = edited(1, lambda ops: ops.pop(at[1]), tied)
    check(alone, 1, "norm", "embed is not summed over the stages that share it")
    unmeasured = edited(0, lambda ops: ops.pop(index(0, Norm, 0, tied)), tied)
    check(unmeasured, 0, "update", "")
    assert not right(alone) and not right(unmeasured)  # what one stage does alone never ends
    early = edited(0, lambda ops: ops.insert(0, ops.pop(at[0])), tied)
    check(early, 0, "shared", "is not reduced yet")
    assert not right(early)
    twice = edited(0, lambda ops: ops.insert(at[0], ops[at[0]]), tied)
    check(twice, 0, "shared", "embed was summed over stages already")
    alone = edited(0, lambda ops: ops.insert(at[0], AllReduce((1,), "stages")), tied)
    check(alone, 0, "shared", r"no other stage has a\[0\]")
    hidden = trace._replace(split=trace.split._replace(shared=()))
    assert "stages share units {0: (0, 1)}, the split says {}" in str(refusal(tied.with_trace(hidden)))


def test_a_stage_that_trains_nothing_of_a_unit_has_nothing_to_add_to_its_sum() -> None:
    """Its gradient shard holds what the step before has left."""
    trace = model(0, 1, tied=True)
    first, head = trace.visits
    trace = trace._replace(visits=(first, head._replace(trained=(1,))))
    made = one_f_one_b(zero2())(cut(on(trace, "ranks"), (0, 1)))
    check(made, 1, "shared", "nothing on this stage trains embed")
    assert not right(made)


def test_calls() -> None:
    first, second = PLAIN.stages
    order = tuple(op for op in first if isinstance(op, Forward | Backward))

    def ordered(*computes: Op) -> Program:
        return Program(WHOLE, computes, second)

    check(ordered(*order[:-3]), 0, "calls", "no backward of segment 0, microbatch 2")
    check(ordered(*order, *order[:3]), 0, "calls", "call 6 .*it is there twice")
    check(ordered(*order[1:]), 0, "calls", r"compute 0 \(forward of visit 1\): rule 'calls': visits 0 to 2 are one")
    check(ordered(*order[-3:], *order[:-3]), 0, "calls", "no forward of segment 0, microbatch 2 before it")
    away = [Forward(visit, (0,), True, m) for m in range(3) for visit in range(3, 6)]
    check(ordered(*away), 0, "calls", "segment 1 is on stage 1")
    later = edited(0, swap(index(0, Forward, 3), index(0, Forward, 4)))  # all weights are there since microbatch 0
    check(later, 0, "calls", "are one")
    assert not right(later)


def test_a_refusal_of_one_stage_names_it() -> None:
    drop = index(1, Receive, 0)
    refused = check(edited(1, lambda ops: ops.pop(drop)), 1, "flow", "^stage 1: op .*carry slot 0 holds nothing")
    assert refused.op > drop


def test_updates_of_some_stages_alone() -> None:
    trace = cut(on(model(4, 2), "ranks", "after norm"), (0, 1))
    updated = one_f_one_b(zero2(update=True))(trace)
    not_updated = one_f_one_b(zero2())(trace)
    mixed = Program(trace, updated.stages[0], not_updated.stages[1])
    check(mixed, 1, "update", "stage 0 updates its units inside its program, stage 1 does not")


def test_match() -> None:
    a = index(0, Send, 0)
    b = index(0, Send, 1)
    first = PLAIN.stages[0][a]
    # the second message overtakes the first: both are in slots of their own
    overtaken = edited(0, lambda ops: ops.insert(b, ops.pop(a)))
    crossed = check(overtaken, 0, "match", "message 0 from stage 0 to 1 is another")
    assert not right(overtaken)
    lines = str(crossed).splitlines()
    assert lines[1] == "    messages from stage 0 to stage 1:"
    assert lines[2].split() == ["stage", "0", "stage", "1"]
    assert "(microbatch 1)" in lines[3].split("<-->")[0]
    assert "(microbatch 0)" in lines[3].split("<-->")[1]
    assert isinstance(first, Send)
    never = [op for op in PLAIN.stages[1] if not (isinstance(op, Send) and op.microbatch == 2)]
    slots = {op.carry_slot for op in PLAIN.stages[1] if isinstance(op, Send) and op.microbatch == 2}
    assert len(slots) == 1
    assert len(never) < len(PLAIN.stages[1])
    check(edited(1, lambda ops: ops.__setitem__(slice(None), never)), 1, "flow", "nothing takes gradient 0 <- 1")


def test_deadlock() -> None:
    """Two stages that both want to be rid of what the other one receives only after that."""
    rows = [
        "0F0 0F1 0SEND_F0 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 2SEND_F0 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 "
        "2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B0 3SEND_B0 3B1 3SEND_B1 1RECV_B0 1B0 "
        "1SEND_B0 1RECV_B1 1B1 1SEND_B1",
    ]
    whole = cut(model(4, 2), (0, 1, 0, 1))
    verify(from_actions([row.split() for row in rows])(whole))
    early = rows[1].replace(
        "1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1", "1RECV_F1 1F1 3RECV_F0 3F0 1SEND_F1 3RECV_F1"
    )
    stuck = from_actions([rows[0].split(), early.split()])(whole)
    refused = refusal(stuck)
    assert not right(stuck)
    terms = account(stuck, SHARDED)
    assert not goes_wrong(terms, waits_of(terms.events), random.Random(0))  # where sends are buffered, it ends
    assert refused.rule == "deadlock"
    lines = [re.sub(" +", " ", line).strip() for line in str(refused).splitlines()]
    assert lines[:3] == [
        "stage 0: op 8 (receive segment 1 -> 2 (microbatch 1) -> carry slot 2): rule 'deadlock': it waits for stage 1, "
        "which waits, too",
        "stage 1 waits at op 11 (receive segment 2 -> 3 (microbatch 0) -> carry slot 0) for stage 0",
        "stage 0 stage 1",
    ]
    assert lines[6] == (
        "op 8 receive segment 1 -> 2 (microbatch 1) -> carry slot 2 <--> "
        "op 11 receive segment 2 -> 3 (microbatch 0) -> carry slot 0"
    )


def test_a_host_may_wait_for_its_device() -> None:
    """A receive is issued before what its sender waits for: it hangs where a forward synchronises the device."""
    made = verify(one_f_one_b(zero3())(cut(model(4, 1), (0, 1))))
    at = index(0, Receive, 0, made)
    last = index(0, Forward, 2, made)
    ahead = edited(0, lambda ops: ops.insert(last, ops.pop(at)), made)
    refused = check(ahead, 0, "deadlock", r"receive gradient 0 <- 1 .*waits for stage 1, which waits, too")
    assert refused.op == last
    assert "stage 1 waits at op" in str(refused)


def test_communication_begins_in_the_order_in_which_it_was_issued() -> None:
    """Two receives at the very start: the second cannot begin, and the gathers behind it would never do."""

    def early(ops: list[Op]) -> None:
        receives = [op for op in ops if isinstance(op, Receive)][:2]
        for at, op in enumerate(ops):
            if isinstance(op, Backward) and op.microbatch < 2 and op.takes:
                ops[at] = op._replace(takes=(90 + op.microbatch,))
        first = [op._replace(carry_slot=90 + op.microbatch) for op in receives]
        ops[:] = [*first, *(op for op in ops if op not in receives)]

    stuck = edited(0, early)
    check(stuck, 0, "deadlock", "which waits, too")
    terms = account(stuck, SHARDED)
    waits = waits_of(terms.events)
    assert drawn(terms, constraints(terms, waits, blocking=True), random.Random(0)) is None
    assert not goes_wrong(terms, waits, random.Random(0))  # where communication begins in any order, all is well


def of_spare(frozen: int, updates: UpdateWhen) -> Trace:
    """embed | a[0] | head on three stages; the first gives to the others. The unit `spare`, which no visit uses, is on
    stage 0; of the visits, number `frozen` trains nothing, and no gradient goes there or comes from it."""
    plain = model(1, 2)
    units = [*plain.units, unit(3, "spare")]
    units[frozen] = unit(frozen, plain.units[frozen].name, trainable=False)
    trace = cut(on(trace_of(units, [(0,), (1,), (2,)], 2), "ranks", updates), (0, 1, 2))
    assert trace.split is not None
    flows = tuple(Flow(0, segment, 64, 32 * (frozen not in (0, segment))) for segment in (1, 2))
    return trace._replace(split=trace.split._replace(flows=flows))


def sent_last(pipeline: Program) -> Program:
    """Stage 0 sends the last of its messages to stage 2 when it has updated."""

    def edit(ops: list[Op]) -> None:
        at = max(at for at, op in enumerate(ops) if isinstance(op, Send) and op.flow == 1)
        ops.insert(max(at for at, op in enumerate(ops) if isinstance(op, Update)), ops.pop(at))

    return edited(0, edit, pipeline)


def test_a_norm_waits_for_the_end_of_a_stage_that_trains_nothing() -> None:
    """It takes the norm with the others when its program is over."""
    made = verify(one_f_one_b(zero2(update=True))(of_spare(2, "after norm")))
    assert right(made)
    stuck = sent_last(made)
    assert not right(stuck)
    check(
        stuck, 0, "deadlock", r"op .*norm of .*it waits for stage 2, which waits, too\n(.*\n)*    stage 2 waits at op"
    )


def test_the_end_of_a_backward_waits_for_every_gradient() -> None:
    """The host is at it before the first update, and what it has not issued yet must not be what others wait for: here
    stage 0 needs a gradient of stage 1 for what stage 1 waits for, a sum over both."""
    trace = cut(on(model(0, 1, tied=True), "ranks", "after norm"), (0, 1))
    whole = verify(one_f_one_b(zero2(update=True))(trace))
    assert right(whole)

    def late(ops: list[Op]) -> None:
        send = ops.pop(index(1, Send, 0, whole))
        ops.insert(next(at for at, op in enumerate(ops) if isinstance(op, Update)) + 1, send)

    stuck = edited(1, late, whole)
    assert refusal(stuck).rule == "deadlock"
    assert not right(stuck)


def test_halves_fit() -> None:
    """Weights before inputs, and a half alone, are no backward."""
    pipeline = zero_bubble()(cut(model(4, 2), (0, 1)))
    kinds = [compute.kind for compute in pipeline.by_stage[1].trace.order]
    assert kinds.count("inputs") == kinds.count("weights") > 0
    halved = [op for op in pipeline.stages[1] if not (isinstance(op, Backward) and op.half == "weights")]
    check(pipeline.with_ops(halved, 1), 1, "calls", "no backward of weights of segment 1")
