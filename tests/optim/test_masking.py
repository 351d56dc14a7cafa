"""Masks are rules over leaves: trees of masks, as Optax takes, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from yafsdp_fn import optim

TREE = {"embed": True, "head": {"weight": False}}
TAKES: dict[str, Callable[[Any], object]] = {
    "masked": lambda mask: optim.masked(optim.sgd(0.1), mask),
    "add_decayed_weights": lambda mask: optim.add_decayed_weights(0.5, mask),
    "adamw": lambda mask: optim.adamw(0.1, mask=mask),
    "leaf_mask": lambda mask: ya.params.leaf_mask(mask, {"w": torch.ones(2)}),
}


@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.parametrize("mask", [TREE, True, 0.5])
def test_what_is_no_rule_is_refused(takes: str, mask: Any) -> None:
    expected = rf"expected a function of a leaf's path and its ya.Param, got {type(mask).__name__}: lambda path, param"
    with pytest.raises(TypeError, match=expected):
        TAKES[takes](mask)
