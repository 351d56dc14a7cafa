"""A visit's backward in two halves, for schedules that put something else between them.

    inputs     grad_x = grad_y w       sent on at once        (the factors grad_y, x are kept)
    weights    slot = grad_y^T x       when nobody waits

Products of `ya.linear` and `ya.embedding` are left for later. What autograd gives for other weights is made in the
first half, and kept.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from yafsdp_fn.engine.gradients import Leaves, Place, Task, close_all, destination, open_all


class Later:
    """What the first half leaves to the second."""

    def __init__(self) -> None:
        self._leaves: Leaves = ()
        self._writes: list[Callable[[], None]] = []
        self._fresh: Sequence[Tensor | None] = ()

    def open(self, leaves: Leaves, task: Task) -> None:
        """Products that are gradients of `leaves` are left for later, in `task`."""
        self._leaves = leaves
        for leaf in self._all():
            if (found := destination(leaf)) is not None:
                found.later, found.task = self._writes, None if leaf._backward_hooks else task
        task.watch()

    def close(self, fresh: Sequence[Tensor | None]) -> None:
        """The first half is over. fresh: what came by autograd, for all leaves"""
        self._fresh = fresh
        for leaf in self._all():
            if (found := destination(leaf)) is not None:
                found.later = found.task = None

    def write(self, places: Sequence[Place]) -> None:
        """The second half: gradients go to `places`."""
        open_all(self._leaves, places, Task(()))
        for write in self._writes:
            write()
        close_all(self._leaves, places, self._fresh)

    def _all(self) -> list[Tensor]:
        return [leaf for leaves in self._leaves for leaf in leaves]
