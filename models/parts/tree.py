"""The trees that a decoder's functions take and give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

Weights = Mapping[str, Tensor]
"""One unit's leaves. A layer sees its own, without the layer axis."""
Batch = Mapping[str, Tensor]
"""`tokens`, `targets` and, where several texts share a row, `documents`: [B, S] integers each."""


class Parts(NamedTuple):
    """Three units' worth of parameters; also the tree of anything else that is kept per part, such as name prefixes."""

    embed: Any
    layers: Any
    head: Any


class Extra(NamedTuple):
    """What a family's layers add to the loss. total: of this batch, to be divided by the number of its targets;
    aux: for people, as `has_aux` takes it"""

    total: Tensor
    aux: dict[str, Any]
