"""Where the gradient of a weight goes, known to the weight itself.

    forward of a visit:   the leaf of every trained weight carries a Destination, still closed
    backward:             opened on the leaf's view of the gradient slot; ya.linear's backward writes there and gives
                          autograd nothing; closed again, and what came by autograd as well is added

A fresh gradient of weight size, and the pass that copies it into its slot, are saved. The destination is found through
the weight tensor, so that a backward in another thread finds it, and nothing is global.

A loss that forms its gradient in the forward pass, before it knows by what it will be scaled, may write there early,
where nothing else needs the place until the backward of the visit; that backward confirms it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

DESTINATION = "_yafsdp_destination"
"""Attribute of the leaves that blocks see as weights."""

Scratch = Callable[[torch.Size, torch.dtype], Tensor]
"""Memory of a shape and dtype, which the next caller overwrites."""


class Task:
    """One run of autograd from `roots`, which begins soon. Another may run inside it: a block whose recomputation asks
    for a gradient of its own must not find that in the slot."""

    __slots__ = ("_number",)

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self._number: int | None = None
        for root in roots:
            if (node := root.grad_fn) is not None:
                node.register_prehook(self._begins)

    def _begins(self, _: object) -> None:
        if self._number is None:
            self._number = torch._C._current_graph_task_id()

    @property
    def runs(self) -> bool:
        """Whether what runs now is this one itself."""
        return self._number is not None and self._number == torch._C._current_graph_task_id()


class Destination:
    """Of one weight in one slot; its visits use it one after the other.

    view: the weight's place in the gradient slot, in the reduce dtype, while it may be written; None: closed
    task: writes count in this run of autograd alone
    state: "free": what is in `view` does not count; "early": a forward has written a gradient there that its backward
        has not confirmed yet; "written": later gradients are added to it
    """

    __slots__ = ("_early", "_scratch", "state", "task", "view")

    def __init__(self, scratch: Scratch) -> None:
        self.view: Tensor | None = None
        self.task: Task | None = None
        self.state: Literal["free", "early", "written"] = "free"
        self._scratch = scratch
        self._early: Tensor | None = None

    def offer(self, view: Tensor) -> None:
        """What `view` will be in the backward that follows at once: the forward may write there already."""
        self._early, self.state = view, "free"

    def open(self, view: Tensor, task: Task | None, *, add: bool) -> None:
        """From here on the gradient may be written in `task`, None: only by `close`; add: to what is there."""
        self.view, self.task, self._early = view, task, None
        if self.state != "early":
            self.state = "written" if add else "free"

    def close(self, grad: Tensor | None) -> None:
        """Ends writing; grad: what came by autograd, of the weight's shape."""
        view, self.view, self.task, state, self.state = self.view, None, None, self.state, "free"
        assert view is not None
        if state == "written":
            if grad is not None:
                view.add_(grad)
        elif grad is None:
            view.zero_()
        else:
            view.copy_(grad)

    @property
    def takes(self) -> bool:
        """Whether a gradient may be written now."""
        return self.state != "early" and self.task is not None and self.task.runs

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
        if self.task is None or not self.task.runs:
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
    """What a block sees of a weight; with `scratch` it requires grad, and has a destination.

    `.data`, not `detach`: a view with a version counter of its own, since slots are overwritten by design
    """
    leaf = view.data
    if scratch is not None:
        leaf.requires_grad_()
        setattr(leaf, DESTINATION, Destination(scratch))
    return leaf


def destination(weight: Tensor) -> Destination | None:
    """The destination of `weight`; None where its gradient is autograd's: outside of a visit, under a transform."""
    found: Destination | None = getattr(weight, DESTINATION, None)
    return found


def same_destination(leaf: Tensor, weight: Tensor) -> Tensor:
    """`leaf`, a new leaf in the place of `weight`, with its destination if that takes a gradient now."""
    if (found := destination(weight)) is not None and leaf.requires_grad and found.takes:
        setattr(leaf, DESTINATION, found)
    return leaf


@contextlib.contextmanager
def within(leaves: Sequence[Tensor], roots: Sequence[Tensor]) -> Iterator[None]:
    """What is written to the destinations of `leaves` counts in the run of autograd from `roots` that follows."""
    found = [here for leaf in leaves if (here := destination(leaf)) is not None]
    before = [here.task for here in found]
    task = Task(roots) if found and not any(leaf._backward_hooks for leaf in leaves) else None
    for here in found:
        here.task = task
    try:
        yield
    finally:
        for here, outer in zip(found, before, strict=True):
            here.task = outer
