"""The list of rules: for each a program that it refuses, a test of its name, and its sentence in docs and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.schedules import test_verify
from tests.schedules.stages import test_proof
from tests.schedules.stages.test_proof import edited, index, of_spare, sent_last
from tests.schedules.test_verify import OFFLOADED, PLAIN, STAGE, WHOLE, Edit, drop, moved, put, replace
from tests.schedules.traces import cut, model, trace_of, unit
from yafsdp_fn.proof.verify import RULES
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Forward,
    Gather,
    Norm,
    Program,
    Reduce,
    Refused,
    Send,
    one_f_one_b,
    verify,
    zero1,
    zero2,
)

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def changed(edit: Edit, program: Program = PLAIN) -> Program:
    ops = list(program.ops)
    edit(ops)
    return Program(program.trace, tuple(ops))


def half_shared() -> Program:
    """Stage 0 of two that share an embedding does not sum up its gradient."""
    tied = one_f_one_b(zero2())(cut(model(4, 2, tied=True), (0, 1)))
    at = tied.stages[0].index(AllReduce((0,), "stages"))
    return edited(0, lambda ops: ops.pop(at), tied)


def overtaken() -> Program:
    """The second message is sent before the first."""
    first, second = index(0, Send, 0), index(0, Send, 1)
    return edited(0, lambda ops: ops.insert(second, ops.pop(first)))


def without_a_backward() -> Program:
    first = test_proof.PLAIN.stages[0]
    lost = [at for at, op in enumerate(first) if isinstance(op, Backward)][-3:]
    return test_proof.PLAIN.with_ops(op for at, op in enumerate(first) if at not in lost)


WRONG: dict[str, Program] = {
    "form": changed(put(0, Gather((7,), (0,)))),
    "order": changed(drop(19, 20)),
    "weights": changed(drop(5)),
    "carry": changed(drop(29), WHOLE),
    "secondary": changed(drop(0), WHOLE),
    "graph": changed(moved),
    "offload": changed(drop(5), OFFLOADED),
    "flow": changed(drop(4), STAGE),
    "gradient": changed(drop(13)),
    "early": changed(replace(9, Forward(4, (3,), False, early=(3,)))),
    "reduce": changed(put(13, Reduce((1,), (0,)))),
    "ordered": zero1()(trace_of([unit(0, "a")], [[0], [0]], 2)._replace(ordered=True)),
    "once": changed(drop(18)),
    "replicas": changed(put(12, AllReduce((4,))), WHOLE),
    "shared": half_shared(),
    "update": changed(drop(32), WHOLE),
    "norm": changed(replace(25, Norm((0, 1, 2, 3))), WHOLE),
    "part": Program(test_proof.PLAIN.trace, *test_proof.PLAIN.stages[:1]),
    "calls": without_a_backward(),
    "match": overtaken(),
    "deadlock": sent_last(one_f_one_b(zero2(update=True))(of_spare(0, "after norm"))),
}
"""By the rule that refuses it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_refuses_a_program_with_its_sentence(rule: object) -> None:
    name, sentence = rule.name, rule.sentence
    with pytest.raises(Refused, match=f"rule '{name}': ") as refused:
        verify(WRONG[name])
    assert refused.value.rule == name
    assert refused.value.__notes__ == [f"rule {name!r} says: {sentence}"]
    assert any(hasattr(module, f"test_{name}") for module in (test_verify, test_proof)), "no test of its name"


def test_the_rules_are_those_of_the_docs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("### The rules of `verify`")[2], re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in RULES]
