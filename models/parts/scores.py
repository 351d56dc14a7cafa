"""Scores targets, without holding the scores of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import yafsdp_fn as ya


class Scored(NamedTuple):
    """The scores of targets."""

    log_probability: Float[Tensor, "B S"]
    """Log-probability in nats, fp32; 0 if there is no target."""
    best: Bool[Tensor, "B S"]
    """True if no token is likelier, or there is no target."""


ROWS = 512
"""Positions whose scores of all tokens exist at once."""


def scored(
    x: Float[Tensor, "B S E"],
    matrix: Float[Tensor, "V E"],
    targets: Int[Tensor, "B S"],
    scores: Callable[[Tensor, Tensor], Tensor] = ya.linear,
) -> Scored:
    """Scores targets by x matrix^T. scores: makes that product"""
    parts = zip(torch.split(x.flatten(0, 1), ROWS), torch.split(targets.flatten(), ROWS), strict=True)
    columns = zip(*(_of_rows(scores(rows, matrix).float(), of) for rows, of in parts), strict=True)
    return Scored(*(torch.cat(column).view(targets.shape) for column in columns))


def _of_rows(scores: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
    counts = targets != -100
    of_target = scores.gather(1, targets.where(counts, 0)[:, None])[:, 0]
    return (of_target - scores.logsumexp(1)) * counts, (of_target >= scores.amax(1)) | ~counts
