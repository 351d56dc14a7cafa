"""Every kind of op has its row wherever ops are told apart: what a new one lacks is named here."""

from __future__ import annotations

import pytest

from tests.schedules.test_scoreboard import EVERY_OP
from tests.schedules.traces import cut, on, trace_of, unit
from yafsdp_fn.engine.interpreter import WORKS
from yafsdp_fn.levers.offload import HostCarries
from yafsdp_fn.planner.cluster import A100
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.schedules import Program, Refused, verify
from yafsdp_fn.schedules.further_ops import Fetch, Offload, Receive, Send
from yafsdp_fn.schedules.ops import OPS, Backward, Forward, Norm, Op, Update
from yafsdp_fn.schedules.stages.part import part_of
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.well_formed import KNOWN_FIELDS
from yafsdp_fn.staged.mail import Mail
from yafsdp_fn.timeline.text import KINDS

WHOLE = cut(on(trace_of([unit(0, "a"), unit(1, "b")], [[0], [1]]), "nodes", "after norm"), (0, 1))
TRACE = part_of(WHOLE, 0, ())


@pytest.mark.parametrize("op", EVERY_OP, ids=lambda op: type(op).__name__)
def test_every_op_has_a_row_everywhere(op: Op) -> None:
    assert describe(op, TRACE) not in (repr(op), "copy a"), "no words: schedules/text.py"
    assert set(op._fields) <= KNOWN_FIELDS, "a field that is not checked: schedules/well_formed.py"
    with pytest.raises(Refused):  # no program ends with one op of two; KeyError: no rule in schedules/verify.py
        verify(Program(TRACE, (op, Forward(0, (0,), True))))
    by_the_session = isinstance(op, Forward | Backward | Norm | Update)
    by_a_lever = isinstance(op, Offload | Fetch) and type(op) in HostCarries.works(object.__new__(HostCarries))
    by_a_stage = isinstance(op, Send | Receive) and type(op) in Mail.works(object.__new__(Mail))
    assert by_the_session or by_a_lever or by_a_stage or type(op) in WORKS, "no work: engine/interpreter.py"
    phases(op, TRACE, A100, groups(TRACE, A100), recompute=False)  # AttributeError: no cost in planner/costs.py
    assert type(op) in KINDS, "no kind: timeline/text.py"


def test_there_is_one_of_every_kind() -> None:
    assert {type(op) for op in EVERY_OP} == set(OPS.values())
