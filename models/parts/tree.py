"""The trees that a decoder's functions take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

Weights = Mapping[str, Tensor]
"""One unit's leaves. A layer sees its own, without the layer axis."""
Batch = Mapping[str, Tensor]
"""`tokens`, `targets` and, if several texts share a row, `documents`: [B, S] integers each."""

NEEDED = ("tokens", "targets")
KNOWN = ("tokens", "targets", "documents")


def must_be_read(batch: Batch, more: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless a loss reads all that a batch has, and finds what it needs. more: further keys that it
    reads"""
    *first, last = known = (*KNOWN, *more)
    unread = sorted(batch.keys() - set(known))
    missing = [key for key in NEEDED if key not in batch]
    if unread or missing:
        found = ", ".join(unread) or f"no {' and no '.join(missing)}"
        raise ValueError(
            f"the batch has {found}: a loss of models reads {', '.join(first)} and {last}, and nothing else. Packed "
            "texts are told apart by `documents`, and targets of -100 do not count: leave out masks and positions"
        )
    must_be_alike(batch["tokens"], batch["targets"])


def must_be_alike(tokens: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless there is a target for each token [B, S]."""
    first, second = (tuple(getattr(each, "shape", ())) for each in (tokens, targets))
    if len(first) != 2 or first != second:
        raise ValueError(
            f"tokens have the shape {first}, targets {second}: expected tensors [B, S], a target for each token"
        )


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
