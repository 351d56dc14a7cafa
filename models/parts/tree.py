"""The trees that a decoder's functions take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

Weights = Mapping[str, Tensor]
"""One unit's leaves. A layer sees its own, without the layer axis."""
Batch = Mapping[str, Tensor]
"""`tokens`, `targets` and, if several texts share a row, `documents`: [B, S] integers each."""


class Parts(NamedTuple):
    """The three parts of a model's parameters; also a tree of anything else kept per part, such as name prefixes."""

    embed: Any
    layers: Any
    head: Any


class Extra(NamedTuple):
    """The layers' addition to the loss. total: of this batch, to be divided by the number of its targets; aux: for
    people, as for `has_aux`
    """

    total: Tensor
    aux: dict[str, Any]
