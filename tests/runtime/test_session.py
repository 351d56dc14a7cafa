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


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("which", OTHERS)
def test_other_visits_in_a_later_step(mesh: Any, which: str) -> None:
    other, text = OTHERS[which]
    rank = mesh.get_local_rank()
    usual = True

    def total(tree: Any, data: Any) -> Any:
        return (loss if usual else other)(tree, data)

    step, oracle = ya.train_step(total, TX), ya.train_step(loss, TX)
    now, _ = step(state(mesh), batch(rank))
    expected, _ = oracle(state(mesh), batch(rank))
    for _ in range(2):
        usual = False
        with pytest.raises(ya.errors.OrderChanged, match=text + ADVICE):
            step(now, batch(rank))
        usual = True
        now, _ = step(now, batch(rank))
        expected, _ = oracle(expected, batch(rank))
        assert same(bits(now), bits(expected))
    evaluate = ya.eval_step(total)
    evaluate(now, batch(rank))
    usual = False
    assert "OrderChanged" in outcome(lambda: evaluate(now, batch(rank)))
    step = ya.train_step(total, TX)  # as the error says: a step of its own for another order
    for _ in range(2):
        now, _ = step(now, batch(rank))


MICROBATCHES = {
    "fewer": (headless, r"backward of layers\[2\] \(visit 3, microbatch 1, .* expects forward head"),
    "more": (longer, r"forward of head \(visit 5, microbatch 1, .* expects backward head"),
    "another order": (backwards, r"forward of layers\[2\] \(visit 1, microbatch 1, .* expects forward layers\[0\]"),
}


@pytest.mark.sampled
@on_ranks(1, 2)
@pytest.mark.parametrize("which", MICROBATCHES)
def test_microbatches_that_differ(mesh: Any, which: str) -> None:
    """The second microbatch visits other units, in the first step and in later ones."""
    other, text = MICROBATCHES[which]
    rank, usual = mesh.get_local_rank(), False

    def total(tree: Any, data: Any) -> Any:
        return (loss if usual or not data["second"][0] else other)(tree, data)

    data = batch(rank) | {"second": torch.tensor([False, False, True, True])}

    now, step = state(mesh), ya.train_step(total, TX, microbatches=2)
    oracle = ya.train_step(loss, TX, microbatches=2)
    before = bits(now)
    for _ in range(2):
        with pytest.raises(ya.errors.OrderChanged, match=text + ADVICE):
            step(now, data)
    assert same(bits(now), before)
    usual, expected = True, state(mesh)
    for _ in range(2):
        now, _ = step(now, data)
        expected, _ = oracle(expected, data)
        assert same(bits(now), bits(expected))
    usual = False
    with pytest.raises(ya.errors.OrderChanged, match="microbatch 1" + ADVICE):
        step(now, data)
    usual = True
    now, _ = step(now, data)
    expected, _ = oracle(expected, data)
    assert same(bits(now), bits(expected))
