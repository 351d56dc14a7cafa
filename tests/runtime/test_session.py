"""A loss that visits other units than its program expects is stopped at the first difference, and the state stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import (
    TX,
    LossFn,
    backwards,
    batch,
    bits,
    embed,
    head,
    headless,
    layer,
    longer,
    loss,
    same,
    state,
)
from tests.harness.groups import outcome
from tests.harness.pool import on_ranks


def skipping(tree: Any, data: Any) -> Tensor:
    """No layers."""
    return ya.apply(head, tree["head"], ya.apply(embed, tree["embed"], data["tokens"]), data["targets"])


def together(tree: Any, data: Any) -> Tensor:
    """The same units in the same order, two of them in one visit."""
    x = ya.apply(embed, tree["embed"], data["tokens"])
    x, _ = ya.scan(layer, x, tree["layers"], unroll=2)
    return ya.apply(head, tree["head"], x, data["targets"])


def nothing(tree: Any, data: Any) -> Tensor:
    return sum((leaf.square().sum() for leaf in (tree["head"].leaves)), torch.zeros(()))


ADVICE = r"[\s\S]*visit the same units in the same order"
OTHERS: dict[str, tuple[LossFn, str]] = {
    "fewer": (skipping, r"forward of head \(visit 1, microbatch 0, step \d\).*expects .*layers\[0\]"),
    "fewer at the end": (headless, r"backward of layers\[2\] \(visit 3, microbatch 0, step \d\).*expects .*head"),
    "more": (longer, r"forward of head \(visit 5, microbatch 0, step \d\).*expects backward.* head"),
    "another order": (backwards, r"forward of layers\[2\] \(visit 1, microbatch 0, step \d\).*expects .*layers\[0\]"),
    "other groups": (together, r"forward of layers\[0:1\] \(visit 1, microbatch 0, step \d\).*expects .*layers\[0\]"),
    "none": (nothing, r"the step ended.*embed"),
}


MICROBATCHES = {
    "fewer": (headless, r"backward of layers\[2\] \(visit 3, microbatch 1, .* expects forward head"),
    "more": (longer, r"forward of head \(visit 5, microbatch 1, .* expects backward head"),
    "another order": (backwards, r"forward of layers\[2\] \(visit 1, microbatch 1, .* expects forward layers\[0\]"),
}


CASES = {1: OTHERS, 2: MICROBATCHES}


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize(("parts", "which"), [(parts, which) for parts, others in CASES.items() for which in others])
def test_other_visits_are_refused(mesh: Any, parts: int, which: str) -> None:
    """In a later step and in an evaluation; of the second of two microbatches, in the first step, too."""
    other, text = CASES[parts][which]
    usual, now, expected = False, state(mesh), state(mesh)
    data = batch(mesh.get_local_rank()) | {"other": torch.tensor([parts == 1, parts == 1, True, True])}

    def total(tree: Any, data: Any) -> Any:
        return (loss if usual or not data["other"][0] else other)(tree, data)

    def refused() -> None:
        with pytest.raises(ya.errors.OrderChanged, match=text + ADVICE):
            step(now, data)

    step, oracle = (ya.train_step(of, TX, microbatches=parts) for of in (total, loss))
    if parts == 2:
        refused()
        refused()
        assert same(bits(now), bits(expected))
    for _ in range(3):
        usual = True
        now, _ = step(now, data)
        expected, _ = oracle(expected, data)
        assert same(bits(now), bits(expected))
        usual = False
        refused()
    evaluate = ya.eval_step(total, microbatches=parts)
    usual = True
    evaluate(now, data)
    usual = False
    assert "OrderChanged" in outcome(lambda: evaluate(now, data))
    step = ya.train_step(total, TX)  # as the error says: a step of its own for another order
    for _ in range(2):
        now, _ = step(now, data)
