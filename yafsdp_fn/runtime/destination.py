"""Where the gradient of a weight goes, known to the weight itself.

    forward of a visit:   the leaf of every trained weight carries a Destination, still closed
    backward:             opened on the leaf's view of the gradient slot; ya.linear's backward writes there and gives
                          autograd nothing; closed again, and what came by autograd as well is added

A fresh gradient of weight size, and the pass that copies it into its slot, are saved. The destination is found through
the weight tensor, so that a backward in another thread finds it, and nothing is global.

A forward whose own backward is the next compute may be given the view early (`early`), for losses that form their
gradient in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

DESTINATION = "_yafsdp_destination"
"""Attribute of the leaves that blocks see as weights."""

Scratch = Callable[[torch.Size, torch.dtype], Tensor]
"""Memory of a shape and dtype, which the next caller overwrites."""


class Destination:
    """Of one weight in one visit.

    view: the weight's place in the gradient slot, in the reduce dtype, while it may be written; None: closed
    state: "free": what is in `view` does not count; "early": a forward has written a gradient there that its backward
        has not confirmed yet; "written": later gradients are added to it
    """

    __slots__ = ("_scratch", "state", "view")

    def __init__(self) -> None:
        self.view: Tensor | None = None
        self.state: Literal["free", "early", "written"] = "free"
        self._scratch: Scratch | None = None

    def open(self, view: Tensor, scratch: Scratch, *, add: bool) -> None:
        """From here on the gradient may be written; add: to what is there."""
        self.view, self._scratch = view, scratch
        if add:
            self.state = "written"

    def close(self, grad: Tensor | None) -> None:
        """Ends writing; grad: what came by autograd, of the weight's shape."""
        view, self.view, self._scratch = self.view, None, None
        assert view is not None
        if self.state == "written":
            if grad is not None:
                view.add_(grad)
        elif grad is None:
            view.zero_()
        else:
            view.copy_(grad)

    @property
    def takes(self) -> bool:
        """Whether a gradient may be written now."""
        return self.view is not None and self.state != "early"

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
            assert self._scratch is not None
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


def destination(weight: Tensor) -> Destination | None:
    """The destination of `weight`; None where its gradient is autograd's: outside of a visit, under a transform."""
    found: Destination | None = getattr(weight, DESTINATION, None)
    return found


def same_destination(leaf: Tensor, weight: Tensor) -> Tensor:
    """`leaf`, a new leaf in the place of `weight`, with its destination."""
    found = destination(weight)
    if found is not None:
        setattr(leaf, DESTINATION, found)
    return leaf
