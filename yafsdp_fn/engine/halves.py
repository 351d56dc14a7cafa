"""Where a visit's backward leaves the gradients of weights: in their places at once, or, in two halves, later.

    inputs     grad_x = grad_y w       sent on at once        (the factors grad_y, x are kept)
    weights    slot = grad_y^T x       when nobody waits

Products of `ya.linear` and `ya.embedding` are left for later. What autograd gives for other weights is made in the
first half, and kept.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from yafsdp_fn.engine.gradients import Place, Task, close_all, destination, open_all

Leaves = Sequence[Sequence[Tensor]]
"""Of each trained unit."""


class AtOnce:
    """Gradients go to `places`, one of each trained unit."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._leaves: Leaves = ()

    def open(self, leaves: Leaves, task: Task) -> None:
        """They may be written from here on."""
        self._leaves = leaves
        for unit_leaves, place in zip(leaves, self._places, strict=True):
            open_all(unit_leaves, place, task)

    def close(self, fresh: Sequence[Tensor | None]) -> None:
        """All are found. fresh: what came by autograd, for all leaves"""
        at = 0
        for leaves, place in zip(self._leaves, self._places, strict=True):
            close_all(leaves, place, fresh[at : at + len(leaves)])
            at += len(leaves)


class Later:
    """They wait for the second half."""

    def __init__(self) -> None:
        self._leaves: Leaves = ()
        self._writes: list[Callable[[], None]] = []
        self._fresh: Sequence[Tensor | None] = ()

    def open(self, leaves: Leaves, task: Task) -> None:
        self._leaves = leaves
        for leaf in self._all():
            if (found := destination(leaf)) is not None:
                found.later, found.task = self._writes, None if leaf._backward_hooks else task
        task.watch()

    def close(self, fresh: Sequence[Tensor | None]) -> None:
        self._fresh = fresh
        for leaf in self._all():
            if (found := destination(leaf)) is not None:
                found.later = found.task = None

    def write(self, places: Sequence[Place]) -> None:
        """The second half: gradients go to `places`."""
        target = AtOnce(places)
        target.open(self._leaves, Task(()))
        for write in self._writes:
            write()
        target.close(self._fresh)

    def _all(self) -> list[Tensor]:
        return [leaf for leaves in self._leaves for leaf in leaves]
