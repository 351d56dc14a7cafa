"""What `verify` says of a program, beside `overlapped.right`, which executes it and knows no rules."""

from __future__ import annotations

from collections import Counter

from tests.proof.overlapped import right
from yafsdp_fn.schedules import Program, Refused, verify

RULES = {
    *("form", "order", "weights", "carry", "secondary", "graph"),
    *("gradient", "early", "reduce", "once", "replicas", "norm", "update", "offload", "flow"),
}
Verdicts = Counter[tuple[str, bool]]
"""(rule that refuses, "" if none does; whether the result is right) -> how many"""


def refusal(mutant: Program) -> str:
    """The rule that refuses `mutant`, "" if none does."""
    try:
        verify(mutant)
    except Refused as refused:
        assert refused.rule in RULES
        assert f"rule {refused.rule!r}" in str(refused)
        return refused.rule
    return ""


def judged(mutant: Program, verdicts: Verdicts) -> bool:
    """Counts the verdict on `mutant`, which must not be accepted if it is wrong. Gives whether it is accepted."""
    rule = refusal(mutant)
    fine = right(mutant)
    assert rule or fine, f"accepted, though wrong (updates {mutant.trace.update_when}):\n{mutant}"
    verdicts[rule, fine] += 1
    return not rule


def harmless(verdicts: Verdicts) -> float:
    """The share of refused programs that would have been right."""
    refused = {key: number for key, number in verdicts.items() if key[0]}
    fine = sum(number for (_, fine), number in refused.items() if fine)
    by_rule = ", ".join(f"{rule} {n}" for (rule, fine), n in sorted(refused.items()) if fine)
    print(
        f"\nrefused: {sum(refused.values())}, of these {fine} would have been right ({by_rule}); {verdicts['', True]} "
    )
    return fine / max(1, sum(refused.values()))
