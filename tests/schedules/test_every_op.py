"""Every kind of op has its row wherever ops are told apart: what a new one lacks is named here."""

from __future__ import annotations

import pytest

from tests.schedules.test_scoreboard import EVERY_OP
from tests.schedules.traces import cut, on, trace_of, unit
from yafsdp_fn.extras.offload import HostActivationBuffers
from yafsdp_fn.planner.cluster import A100
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.program.ops import OPS, Backward, Fetch, Forward, Norm, Offload, Op, Receive, Send, Update
from yafsdp_fn.program.program import part_of
from yafsdp_fn.program.text import describe
from yafsdp_fn.proof.form import check_form
from yafsdp_fn.runtime.interpreter import WORKS
from yafsdp_fn.runtime.stage_io import MessageBuffers
from yafsdp_fn.schedules import Program, Refused, verify
from yafsdp_fn.timeline.spans import KINDS

WHOLE = cut(on(trace_of([unit(0, "a"), unit(1, "b")], [[0], [1]]), "nodes", "after norm"), (0, 1))
TRACE = part_of(WHOLE, 0, ())


@pytest.mark.parametrize("op", EVERY_OP, ids=lambda op: type(op).__name__)
def test_every_op_has_a_row_everywhere(op: Op) -> None:
    assert describe(op, TRACE) not in (repr(op), "copy a"), "no words: program/text.py"
    for field in op._fields:
        with pytest.raises(Refused, match="rule 'form'"):  # by its annotation
            check_form(Program(TRACE, (op._replace(**{field: object()}),)))
    with pytest.raises(Refused):  # no program ends with one op of two; AttributeError: not in proof/walk.py
        verify(Program(TRACE, (op, Forward(0, (0,), True))))
    by_the_session = isinstance(op, Forward | Backward | Norm | Update)
    by_a_lever = isinstance(op, Offload | Fetch) and type(op) in HostActivationBuffers.works(
        object.__new__(HostActivationBuffers)
    )
    by_a_stage = isinstance(op, Send | Receive) and type(op) in MessageBuffers.works(object.__new__(MessageBuffers))
    assert by_the_session or by_a_lever or by_a_stage or type(op) in WORKS, "no work: runtime/interpreter.py"
    phases(op, TRACE, A100, groups(TRACE, A100), recompute=False)  # AttributeError: no cost in planner/costs.py
    assert type(op) in KINDS, "no kind: timeline/text.py"


def test_there_is_one_of_every_kind() -> None:
    assert {type(op) for op in EVERY_OP} == set(OPS.values())
