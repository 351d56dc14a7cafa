"""What a program's norms and updates call, and when they come too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from yafsdp_fn.runtime.steps import Results

LEAVES_COME_LATE = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): their gradient is known only at the end of "
    "the backward, but this program updates units before. Visit them (ya.apply, ya.scan), or keep the optimizer out of "
    "the program (update=False)"
)


class Updates(Protocol):
    """The optimizer of a step whose program has updates. All calls but `begin` are work of the compute stream."""

    def begin(self, results: Results) -> None:
        """After the last forward: all losses are in `results`."""

    def norm(self) -> None:
        """All gradients are complete."""

    def update(self, units: tuple[int, ...]) -> None:
        """The gradients of `units` are complete, and nobody reads their weights any more."""
