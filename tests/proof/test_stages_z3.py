"""z3, which may choose any order of the ops of all stages, has teeth of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("z3", reason="z3-solver, of the dev extra, is not installed")

from tests.program.traces import cut, model, on
from tests.proof.overlapped import without
from tests.proof.reference import SHARDED
from tests.proof.stages_smt import SmtPipeline
from tests.proof.z3_orders import bad_order, ends, opinion, waits_of
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Norm,
    Op,
    Program,
    Receive,
    Refused,
    Send,
    Update,
    one_f_one_b,
    verify,
    zero2,
    zero3,
)

PLAIN = verify(one_f_one_b(zero3())(cut(on(model(0, 2), "ranks"), (0, 1))))


def test_without_a_wait_for_a_message_z3_finds_the_order_that_goes_wrong() -> None:
    """Of the first step's waits each that is of messages; the second step reads what it leaves."""
    joint = SmtPipeline(PLAIN, SHARDED)
    waits = waits_of(joint)
    assert ends(joint, waits)
    assert bad_order(joint, waits) is None
    needed = [
        (at, wait)
        for at, found in enumerate(waits)
        for wait in found
        if joint.events[at].step == 0
        and any(isinstance(joint.events[event].op, Send | Receive) for event in (at, wait))
    ]
    assert len(needed) == 10
    for pair in needed:
        found = bad_order(joint, without(waits, pair))
        assert found is not None
        assert found[0].what == "it takes something else than what is for it"
        assert found[1][0].startswith("stage ")


def test_a_message_is_what_was_sent_in_its_turn() -> None:
    ops = list(PLAIN.stages[1])
    first, second = [at for at, op in enumerate(ops) if isinstance(op, Receive)]
    ops[first], ops[second] = ops[second], ops[first]
    crossed = PLAIN.with_ops(ops, 1)
    with pytest.raises(Refused, match="rule 'match'"):
        verify(crossed)
    bad = opinion(crossed)
    assert bad is not None
    assert bad.order is not None
    assert bad.why.startswith("stage 1, step 0: Forward(visit=1")
    assert "takes something else" in bad.why


def test_stages_that_wait_for_each_other_have_no_order() -> None:
    """Both receives at the very start: the second cannot begin, and nor do the gathers that were issued behind it."""
    joint = SmtPipeline(stuck := early(), SHARDED)
    with pytest.raises(Refused, match="rule 'deadlock'"):
        verify(stuck)
    waits = waits_of(joint)
    assert not ends(joint, waits)
    assert bad_order(joint, waits) is None  # where communication begins in any order, all is well
    bad = opinion(stuck)
    assert bad is not None
    assert bad.why == "stages wait for each other"


def early() -> Program:
    received: list[Op] = []
    rest: list[Op] = []
    for op in PLAIN.stages[0]:
        if isinstance(op, Receive):
            received.append(op._replace(carry_slot=8 + op.microbatch))
        else:
            rest.append(op._replace(takes=(8 + op.microbatch,)) if isinstance(op, Backward) and op.takes else op)
    return PLAIN.with_ops([*received, *rest], 0)


@pytest.mark.parametrize("kind", [AllReduce, Norm])
def test_what_one_stage_does_alone_stops(kind: type[Op]) -> None:
    trace = cut(on(model(0, 1, tied=True), "ranks", "after norm"), (0, 1))
    whole = verify(one_f_one_b(zero2(update=True))(trace))
    assert opinion(whole) is None
    alone = whole.with_ops([op for op in whole.stages[0] if not isinstance(op, kind)], 0)
    with pytest.raises(Refused, match=r"rule '(norm|update)'"):
        verify(alone)
    bad = opinion(alone)
    assert bad is not None
    assert bad.order is None
    assert bad.why == "it waits for what never comes"


def test_a_unit_that_stages_share_is_summed_where_it_is_complete() -> None:
    """A sum before the reduction of its stage's part loses that part on the other."""
    trace = cut(on(model(0, 1, tied=True), "ranks"), (0, 1))
    whole = verify(one_f_one_b(zero2())(trace))
    ops = list(whole.stages[1])
    at = next(at for at, op in enumerate(ops) if isinstance(op, AllReduce))
    ops.insert(2, ops.pop(at))
    joint = SmtPipeline(whole.with_ops(ops, 1), SHARDED)
    bad = bad_order(joint, waits_of(joint))  # hosts that wait for their devices would never come to it
    assert bad is not None
    assert "the gradient of embed" in bad[0].what


def test_a_stage_that_trains_nothing_of_a_unit_has_nothing_to_add_to_its_sum() -> None:
    """Its gradient shard holds what the step before has left."""
    trace = model(0, 1, tied=True)
    first, head = trace.visits
    trace = trace._replace(visits=(first, head._replace(trained=(1,))))
    made = one_f_one_b(zero2())(cut(on(trace, "ranks"), (0, 1)))
    with pytest.raises(Refused, match="rule 'shared': nothing on this stage trains embed"):
        verify(made)
    bad = opinion(made)
    assert bad is not None
    assert bad.order is not None
    assert "the gradient of embed" in bad.why


def test_the_end_of_a_backward_waits_for_every_gradient() -> None:
    """The host is at it before the first update, and what it has not issued yet must not be what others wait for: here
    stage 0 needs a gradient of stage 1 for what stage 1 waits for, a sum over both."""
    trace = cut(on(model(0, 1, tied=True), "ranks", "after norm"), (0, 1))
    whole = verify(one_f_one_b(zero2(update=True))(trace))
    assert opinion(whole) is None
    ops = list(whole.stages[1])
    send = ops.pop(next(at for at, op in enumerate(ops) if isinstance(op, Send)))
    ops.insert(next(at for at, op in enumerate(ops) if isinstance(op, Update)) + 1, send)
    with pytest.raises(Refused, match="rule 'deadlock'"):
        verify(whole.with_ops(ops, 1))
    bad = opinion(whole.with_ops(ops, 1))
    assert bad is not None
    assert bad.why == "stages wait for each other"
