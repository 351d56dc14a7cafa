"""Every kind of op has its row wherever ops are told apart: what a new one lacks is named here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.program.test_hazards import EVERY_OP
from tests.program.traces import cut, on, trace_of, unit
from tests.schedules.cases import LARGER, SMALL, program
from yafsdp_fn.extras.offload import HostActivationBuffers
from yafsdp_fn.pipelines.stage_io import MessageBuffers
from yafsdp_fn.planner.cluster import A100
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.program.ops import (
    OPS,
    Backward,
    Fetch,
    FillsWeights,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    ReadsWeights,
    Receive,
    Reduce,
    Send,
    Stash,
    Update,
    filled,
    slot_fields,
)
from yafsdp_fn.program.program import stage_trace
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.form import check_form
from yafsdp_fn.runtime.works import WORKS
from yafsdp_fn.schedules import Program, Refused, one_f_one_b, verify

WHOLE = cut(on(trace_of([unit(0, "a"), unit(1, "b")], [[0], [1]]), "nodes", "after norm"), (0, 1))
TRACE = stage_trace(WHOLE, 0, ())


@pytest.mark.parametrize("op", EVERY_OP, ids=lambda op: type(op).__name__)
def test_every_op_has_a_row_everywhere(op: Op) -> None:
    assert describe(op, TRACE) not in (repr(op), "copy a"), "no words: program/text.py"
    for field in op._fields:
        with pytest.raises(Refused, match="rule 'form'"):  # by its annotation
            check_form(Program(TRACE, (op._replace(**{field: object()}),)))
    with pytest.raises(Refused):  # no program ends with one op of two; AttributeError: not in proof/execution.py
        verify(Program(TRACE, (op, Forward(0, (0,), True))))
    by_the_session = isinstance(op, Forward | Backward | Reduce | Norm | Update)
    by_a_lever = isinstance(op, Offload | Fetch) and type(op) in HostActivationBuffers.works(
        object.__new__(HostActivationBuffers)
    )
    by_a_stage = isinstance(op, Send | Receive) and type(op) in MessageBuffers.works(object.__new__(MessageBuffers))
    assert by_the_session or by_a_lever or by_a_stage or type(op) in WORKS, "no work: runtime/works.py"
    Costs(TRACE, A100).phases(op)  # AttributeError: no cost in planner/costs.py


def changed(op: Op) -> Iterator[tuple[Op, bool]]:
    """`op` with a number too many or too few, a negative one, or a slot that nothing else uses; and whether it is
    the form that is wrong."""
    numbers_slots = {field for field, _ in slot_fields(op)}
    for field, value in op._asdict().items():
        if isinstance(value, tuple):
            yield op._replace(**{field: (-1, *value[1:])}), True
            yield op._replace(**{field: (*value, 7)}), False
            yield op._replace(**{field: value[1:]}), False
        elif type(value) is int or field in numbers_slots:
            yield op._replace(**{field: -1}), field not in ("microbatch", "part")  # their rules know how many there are
        if field in numbers_slots:
            yield op._replace(**{field: (7,) * len(value) if isinstance(value, tuple) else 7}), False


RIGHT = (
    program(LARGER["three layers"], "hpz, update after norm"),
    program(SMALL["one unit, two visits"], "zero3, offload"),
    program(SMALL["one unit"], "zero3, update in parts"),
    one_f_one_b()(WHOLE),
)
"""With ops of every kind."""


@pytest.mark.parametrize("kind", OPS, ids=lambda kind: kind.__name__)
def test_wrong_counts_negative_numbers_and_slots_that_nothing_else_uses_are_refused(kind: type[Any]) -> None:
    """In the place of an op of a right program: with a reason, and no other exception."""
    found = [one for one in RIGHT if any(isinstance(op, kind) for op in one.stages[0])]
    assert found, f"no right program with a {kind.__name__}: RIGHT"
    right = found[0]
    at = next(at for at, op in enumerate(right.stages[0]) if isinstance(op, kind))
    verify(right)
    for wrong, form in changed(right.stages[0][at]):
        if wrong != right.stages[0][at]:
            with pytest.raises(Refused) as refused:
                verify(right.with_ops((*right.stages[0][:at], wrong, *right.stages[0][at + 1 :])))
            assert refused.value.rule == "form" or not form, wrong


class Copied(NamedTuple):
    """An op that fills slots from slots."""

    units: tuple[int, ...]
    sources: ReadsWeights
    slots: FillsWeights


def test_annotations_say_which_slots_an_op_reads_and_fills() -> None:
    op: Any = Copied((3, 4), (7, 8), (1, 2))
    assert TRACE.weights_of(op) == ((3, 7), (4, 8))
    assert filled(op) == filled(Gather((3, 4), (1, 2))) == ((3, 1), (4, 2))
    assert filled(Stash((3,), (1,))) == filled(Backward(0, (1,), (1,))) == ()
