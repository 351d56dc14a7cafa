"""Where the gradient of a weight goes, known to the weight itself.

    forward of a visit:   the leaf of every trained weight carries a Destination, still closed
    backward:             opened on the leaf's view of the gradient slot; ya.linear's backward writes there and gives
                          autograd nothing; closed again, and what came by autograd as well is added

A fresh gradient of weight size, and the pass that copies it into its slot, are saved. The destination is found through
the weight tensor, so that a backward in another thread finds it, and nothing is global.

A loss that forms its gradient in the forward pass, before it knows by what it will be scaled, may write there early,
where the program says that nothing else needs the place until the visit's backward; that backward confirms it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.torch_private import foreach_copy, graph_task_id

DESTINATION = "_yafsdp_destination"
"""Attribute of the leaves that blocks see as weights."""

LARGE = 1 << 16
"""Elements of a weight from which the copy that is saved costs more than a backward in Python (5 us of a CPU)."""

Scratch = Callable[[torch.Size, torch.dtype], Tensor]
"""Memory of a shape and dtype, which the next caller overwrites."""


class GradViews(NamedTuple):
    """The gradient of a unit in a flat vector: the whole, its leaves, and what belongs to no leaf."""

    flat: Tensor
    leaves: list[Tensor]
    gaps: list[Tensor]


class Place(NamedTuple):
    """Where the gradient of one trained unit goes. add: to what is there"""

    views: GradViews
    add: bool


class Task:
    """One run of autograd from `roots`, which begins soon. Another may run inside it: a block whose recomputation asks
    for a gradient of its own must not find that in the slot."""

    __slots__ = ("_roots", "number")

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self.number: int | None = None  # until it begins
        self._roots = roots

    def watch(self) -> None:
        """Somebody is going to ask for its number."""
        for root in self._roots:
            if (node := root.grad_fn) is not None:
                node.register_prehook(self._begins)
        self._roots = ()

    def _begins(self, _: object) -> None:
        if self.number is None:
            self.number = graph_task_id()


class Destination:
    """Of one weight in one slot; its visits use it one after the other.

    view: the weight's place in the gradient slot, in the reduce dtype, while it may be written; None: closed
    task: writes count in this run of autograd alone
    later: products are kept there, to be made in a later half of the backward; None: they are made at once
    state: "free": what is in `view` does not count; "early": a forward has written a gradient there that its backward
        has not confirmed yet; "written": later gradients are added to it
    """

    __slots__ = ("_early", "_scratch", "later", "state", "task", "view")

    def __init__(self, scratch: Scratch) -> None:
        self.view: Tensor | None = None
        self.task: Task | None = None
        self.later: list[Callable[[], None]] | None = None
        self.state: Literal["free", "early", "written"] = "free"
        self._scratch = scratch
        self._early: Tensor | None = None

    def offer(self, view: Tensor) -> None:
        """What `view` will be in the backward that follows at once: the forward may write there already."""
        self._early, self.state = view, "free"

    @property
    def takes(self) -> bool:
        """Whether a gradient may be written now."""
        task = self.task
        return task is not None and task.number == graph_task_id() and self.state != "early" and self.later is None

    def postpone(self, write: Callable[..., None], *factors: Tensor) -> bool:
        """Whether `write(*factors)` is done in a later half of the backward. factors: memory that nothing overwrites"""
        if self.later is None or self.task is None or self.task.number != graph_task_id():
            return False
        self.later.append(partial(write, *factors))
        return True

    @contextlib.contextmanager
    def early(self) -> Iterator[bool]:
        """Whether the forward may write a gradient inside, which counts if `confirm` is called in the backward."""
        if self._early is None or self.state != "free":
            yield False
            return
        self.view = self._early
        try:
            yield True
            self.state = "early"
        finally:
            self.view = None

    def confirm(self, scale: Tensor) -> bool:
        """Whether what was written early counts from here on, times the scalar `scale`; if it is not the visit's own
        backward that runs, it does not."""
        if self.task is None or self.task.number != graph_task_id():
            return False
        assert self.view is not None
        if scale.device.type != "cpu" or scale != 1:  # a look at it would make the host wait
            self.view.mul_(scale)
        self.state = "written"
        return True

    def write_mm(self, a: Tensor, b: Tensor) -> None:
        """Writes the product of `a` [m, k] and `b` [k, n], or adds it to what was written."""
        view = self.view
        assert view is not None
        if view.dtype == a.dtype:
            if self.state == "written":
                torch.addmm(view, a, b, out=view)
            else:
                torch.mm(a, b, out=view)
        else:  # no kernel of torch's multiplies in one dtype and writes another on every device
            product = torch.mm(a, b, out=self._scratch(view.shape, a.dtype))
            if self.state == "written":
                view.add_(product)
            else:
                view.copy_(product)
        self.state = "written"

    write_chunk = write_mm
    """The same of factors that are overwritten soon: it cannot be left for a later half of the backward."""

    def write_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, ...] to the rows `index` [n] of the gradient, of which all others are zero."""
        view = self.view
        assert view is not None
        if self.state == "free":
            view.zero_()
        rows = rows.to(view.dtype)
        if view.device.type == "cpu":
            view.index_add_(0, index, rows)
        else:  # there, index_add_ adds in no order
            view.index_put_((index,), rows, accumulate=True)
        self.state = "written"


def weight_leaf(view: Tensor, scratch: Scratch | None) -> Tensor:
    """What a block sees of a weight; with `scratch` it requires grad, and if it is large it has a destination.

    `.data`, not `detach`: a view with a version counter of its own, since slots are overwritten by design
    """
    leaf = view.data
    if scratch is not None:
        leaf.requires_grad_()
        if leaf.numel() >= LARGE:
            setattr(leaf, DESTINATION, Destination(scratch))
    return leaf


def destination(weight: Tensor) -> Destination | None:
    """The destination of `weight`; None where its gradient is autograd's: outside of a visit, under a transform."""
    found: Destination | None = getattr(weight, DESTINATION, None)
    return found


Leaves = Sequence[Sequence[Tensor]]
"""Of each trained unit."""


def open_all(leaves: Leaves, places: Sequence[Place], task: Task) -> None:
    """From here on the gradients of each unit's leaves may be written to its place, in `task`."""
    for unit_leaves, place in zip(leaves, places, strict=True):
        _open(unit_leaves, place, task)


def close_all(leaves: Leaves, places: Sequence[Place], grads: Sequence[Tensor | None]) -> None:
    """Ends writing. grads: what came by autograd, for all leaves"""
    at = 0
    for unit_leaves, place in zip(leaves, places, strict=True):
        _close(unit_leaves, place, grads[at : at + len(unit_leaves)])
        at += len(unit_leaves)


def _open(leaves: Sequence[Tensor], place: Place, task: Task) -> None:
    for gap in () if place.add else place.views.gaps:
        gap.zero_()
    destinations = False
    for leaf, view in zip(leaves, place.views.leaves, strict=True):
        found: Destination | None = getattr(leaf, DESTINATION, None)
        if found is not None:
            destinations = True
            found.view, found._early = view, None
            found.task = None if leaf._backward_hooks else task  # a hook is to see the gradient
            if found.state != "early":
                found.state = "written" if place.add else "free"
    if destinations:
        task.watch()


def _close(leaves: Sequence[Tensor], place: Place, grads: Sequence[Tensor | None]) -> None:
    views, values = [], []
    for leaf, view, grad in zip(leaves, place.views.leaves, grads, strict=True):
        written = place.add
        found: Destination | None = getattr(leaf, DESTINATION, None)
        if found is not None:
            written = found.state == "written"
            found.view, found.task, found.state = None, None, "free"
        if grad is None:
            if not written:
                view.zero_()
        elif written:
            view.add_(grad)
        else:
            views.append(view)
            values.append(grad)
    if views:
        foreach_copy(views, values)
