"""The list of rules: for each a program that it refuses, tests of its name, and its sentence in docs and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.program.traces import cut, model, trace_of, unit
from tests.proof import test_stages, test_verify
from tests.proof.listed import begin, drop
from tests.proof.test_stages import edited, index, of_spare, sent_last
from tests.proof.test_verify import PLAIN, WHOLE, moved
from yafsdp_fn.proof.verify import RULES
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Gather,
    Program,
    Refused,
    Send,
    one_f_one_b,
    verify,
    zero1,
    zero2,
)

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def half_shared() -> Program:
    """Stage 0 of two that share an embedding does not sum up its gradient."""
    tied = one_f_one_b(zero2())(cut(model(4, 2, tied=True), (0, 1)))
    at = tied.stages[0].index(AllReduce((0,), "stages"))
    return edited(0, lambda ops: ops.pop(at), tied)


def overtaken() -> Program:
    """The second message is sent before the first."""
    first = index(0, Send, 0)
    second = index(0, Send, 1)
    return edited(0, lambda ops: ops.insert(second, ops.pop(first)))


def without_a_backward() -> Program:
    first = test_stages.PLAIN.stages[0]
    lost = [at for at, op in enumerate(first) if isinstance(op, Backward)][-3:]
    return test_stages.PLAIN.with_ops(op for at, op in enumerate(first) if at not in lost)


WRONG: dict[str, Program] = {
    **{rule: rows[0][0](program) for rule, (program, rows) in test_verify.REFUSED.items()},
    "form": begin(Gather((7,), (0,)))(PLAIN),
    "carry": drop("gather a[0] ->")(WHOLE),
    "graph": moved(PLAIN),
    "gradient": drop("reduce a[2]")(PLAIN),
    "ordered": zero1()(trace_of([unit(0, "a")], [[0], [0]], 2)._replace(ordered=True)),
    "once": drop("reduce a[0]")(PLAIN),
    "shared": half_shared(),
    "stages": Program(test_stages.PLAIN.trace, *test_stages.PLAIN.stages[:1]),
    "calls": without_a_backward(),
    "match": overtaken(),
    "deadlock": sent_last(one_f_one_b(zero2(update=True))(of_spare(0, "after norm"))),
}
"""By the rule that refuses it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_refuses_a_program_with_its_sentence(rule: object) -> None:
    name = rule.name
    sentence = rule.sentence
    with pytest.raises(Refused, match=f"rule '{name}': ") as refused:
        verify(WRONG[name])
    assert refused.value.rule == name
    assert refused.value.__notes__ == [f"rule {name!r} says: {sentence}"]
    tests = {*test_verify.REFUSED, *(each.removeprefix("test_") for each in (*dir(test_verify), *dir(test_stages)))}
    assert name in tests, "no test of its name"


def test_the_rules_are_those_of_the_docs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("### The rules of `verify`")[2], re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in RULES]
