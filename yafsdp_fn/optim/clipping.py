"""Clipping by the global norm: `u * max_norm / max(norm, max_norm)`."""

import dataclasses

from yafsdp_fn.algebra import global_norm
from yafsdp_fn.optim.base import GradientTransformation, scaled, stateless
from yafsdp_fn.params.tree import Tree


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """Rule: scale all updates down so that their global norm is at most `max_norm`."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {self.max_norm}")


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scales all updates by one factor so that their global norm, over all leaves and ranks, is at most `max_norm`.

    The norm of a sharded tree is all-reduced, so every rank multiplies by the same bits.
    """

    def update(updates: Tree, params: Tree | None) -> Tree:
        return scaled(updates, max_norm / global_norm(updates).clamp(min=max_norm))

    return stateless(update, rule=ClipByGlobalNorm(max_norm))
