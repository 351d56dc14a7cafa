"""linear, embedding, linear_cross_entropy: torch's functions, but weight gradients go straight to gradient slots.

    F.linear                             ya.linear inside a visit
    grad_w = grad^T x      (fresh)       slot = grad^T x        (the first use of w)
    slot = grad_w          (a copy)      slot += grad^T x       (a further one)

Outside a visit, under torch.func, under autocast and in torch.compile they are torch's functions.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from yafsdp_fn.nn.cross_entropy import Chunked
from yafsdp_fn.nn.low_rank import LowRank
from yafsdp_fn.util.on_gpu import vector_kernels
from yafsdp_fn.util.torch_private import SingleLevelFunction, graph_task_id, transforms_active

# ---- The destination of a weight's gradient, an attribute of the weight.
#
#     forward of a visit:   the leaf of every large trained weight carries a Destination, still closed
#     backward:             opened on the leaf's view of the gradient slot; ya.linear's backward writes there and gives
#                           autograd nothing; closed again, and gradients that came by autograd as well are added
#
# This avoids allocating a weight-sized gradient, and the copy into its slot. The destination is an attribute of the
# weight tensor, so that a backward in another thread finds it, and nothing is global.
#
# A loss that forms its gradient in the forward pass, before its scale is known, may write there early if the program
# says that nothing else needs the slot until the visit's backward, which confirms the gradient.

DESTINATION = "_yafsdp_destination"
"""Attribute of the leaves that blocks see as weights."""

LARGE = 1 << 16
"""Elements from which the saved copy costs more than a backward in Python (5 us of a CPU)."""

Scratch = Callable[[torch.Size, torch.dtype], Tensor]
"""Returns memory of a shape and dtype, which the next caller overwrites."""


# ---- where a gradient goes


class AutogradRun:
    """One run of autograd. Another may run inside it: a block that asks for a gradient of its own in its backward must
    not find that in the slot. number: None until it begins"""

    number: int | None = None

    def begins_with(self, roots: Sequence[Tensor]) -> None:
        """Numbers the run of autograd that begins with `roots`, as soon as it does."""
        for root in roots:
            if (node := root.grad_fn) is not None:
                node.register_prehook(self._begins)

    def _begins(self, _: object) -> None:
        if self.number is None:
            self.number = graph_task_id()


def multiplies_wider(factors: torch.dtype, product: torch.dtype, device: str) -> bool:
    """Returns whether one kernel multiplies in one dtype and writes another, wider one, on this type of device."""
    return device == "cuda" and product == torch.float32 and factors in (torch.float16, torch.bfloat16)


# ---- one weight


class Destination:
    """The destination of one weight's gradient in one slot. The slot's visits use it one after the other.

    view: the weight's part of the gradient slot, in the reduce dtype, while it may be written; None: closed
    task: the run of autograd whose writes count
    later: keeps `write, *factors` for the later half of a backward; None: gradients are written at once
    state: "free": the content of `view` does not count; "early": a forward has written a gradient that its backward has
        not confirmed yet; "written": later gradients are added
    """

    __slots__ = ("_early", "_scratch", "later", "state", "task", "view")

    def __init__(self, scratch: Scratch) -> None:
        self.view: Tensor | None = None
        self.task: AutogradRun | None = None
        self.later: Callable[..., None] | None = None
        self.state: Literal["free", "early", "written"] = "free"
        self._scratch = scratch
        self._early: Tensor | None = None

    def offer(self, view: Tensor) -> None:
        """Lets the forward write to `view`, the slot of the backward that follows at once."""
        self._early, self.state = view, "free"

    @property
    def takes(self) -> bool:
        """True if a gradient may be written now, or left for the later half of the backward; else autograd is to have
        it."""
        task = self.task
        return task is not None and task.number == graph_task_id() and self.state != "early"

    @contextlib.contextmanager
    def early(self) -> Iterator[bool]:
        """Yields whether the forward may write a gradient inside; it counts if the backward calls `confirm`."""
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
        """Accepts the early gradient, times the scalar `scale`; returns False, without effect, in any backward but the
        visit's own."""
        if self.task is None or self.task.number != graph_task_id():
            return False
        assert self.view is not None
        if (kernels := vector_kernels(self.view)) is not None:
            kernels.scale_(self.view, scale)  # looks at the scale itself: reading it would make the host wait
        elif scale.device.type != "cpu" or scale != 1:
            self.view.mul_(scale)
        self.state = "written"
        return True

    @staticmethod
    def _wider(factors: torch.dtype, view: Tensor) -> bool:
        """Returns whether one kernel multiplies `factors` of another dtype into `view`."""
        return multiplies_wider(factors, view.dtype, view.device.type)

    def write_mm(self, a: Tensor, b: Tensor) -> None:
        """Writes the product of `a` [m, k] and `b` [k, n], or adds it to what was written."""
        if self.later is not None:
            self.later(self.write_mm, a, b)
            return
        view = self.view
        assert view is not None
        if a.dtype == view.dtype or self._wider(a.dtype, view):
            how: dict[str, Any] = {} if view.dtype == a.dtype else {"out_dtype": view.dtype}
            if self.state == "written":
                torch.addmm(view, a, b, out=view, **how)
            else:
                torch.mm(a, b, out=view, **how)
        else:
            product = torch.mm(a, b, out=self._scratch(view.shape, a.dtype))
            if self.state == "written":
                view.add_(product)
            else:
                view.copy_(product)
        self.state = "written"

    write_chunk = write_mm
    """Writes a product of factors that are overwritten soon, and so cannot wait for a later half of the backward."""

    def write_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, ...] to the rows `index` [n] of the gradient; all others are zero."""
        if self.later is not None:
            self.later(self.write_rows, index, rows)
            return
        view = self.view
        assert view is not None
        if self.state == "free":
            view.zero_()
        rows = rows.to(view.dtype)
        if view.device.type == "cpu":
            view.index_add_(0, index, rows)
        else:  # index_add_ on a GPU adds in no fixed order
            view.index_put_((index,), rows, accumulate=True)
        self.state = "written"


def destination(weight: Tensor) -> Destination | None:
    """The destination of `weight`, or None if autograd gets its gradient: outside a visit, or under a transform."""
    found: Destination | None = getattr(weight, DESTINATION, None)
    return found


# ---- The functions.


def linear(x: Tensor, weight: Tensor | LowRank, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear`: x [..., I], weight [O, I], bias [O] -> [..., O]. A weight with an adapter: see `ya.lora`.

    In a block of `ya.scan` or `ya.apply` the gradient of the block's weight goes into its gradient slot without a fresh
    tensor of its size. A view of such a weight (a slice, a transpose) is not recognised: its gradient comes by
    autograd, just as exact.

    >>> ya.linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    tensor([1., 3., 2.])
    """
    if isinstance(weight, LowRank):
        return weight.times(x, bias, linear)
    found: Destination | None = getattr(weight, DESTINATION, None)
    # `_direct`, without a call: a layer has many products
    if found is None or not weight.requires_grad or transforms_active() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled(weight.device.type):
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias, found)
    return out


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Computes `F.embedding`: tokens [...] of integers, weight [V, E] -> [..., E]; its gradient as in `linear`.

    >>> ya.embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    found = _direct(weight)
    return F.embedding(tokens, weight) if found is None else _Embedding.apply(tokens, weight, found)


def _direct(weight: Tensor) -> Destination | None:
    """Returns the destination of `weight` if the gradient of a use of it now may go there."""
    found = destination(weight)
    if found is None or not weight.requires_grad or transforms_active():
        return None
    # a compiled graph is made before its gradient slots are known, and autocast computes in another dtype
    return None if torch.compiler.is_compiling() or torch.is_autocast_enabled(weight.device.type) else found


# ---- The head of a model and its loss as one function.

ON_CPU, ELSEWHERE = (32 << 20, 256), (256 << 20, 2048)
"""Limits of a chunk: bytes of logits in the dtype of the softmax, and the rows always allowed; with fewer, the pass of
each chunk over grad_W would cost time."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """Computes `F.cross_entropy(F.linear(x, weight), targets, reduction="sum")`, softmax and sum in fp32 at least.

    x [..., E], weight [V, E], targets [...] of integers -> a scalar. Targets equal to `ignore_index` do not count.
    chunk: rows of x whose logits exist at once. None: as many as make 32 MiB, but at least 256; on a GPU 256 MiB and
        2048. Under torch.func, and for a second derivative, all
    Raises torch's error for a target outside [0, V): IndexError, on CUDA a failed assertion on the device.

    >>> x, weight, targets = torch.ones(2, 4), torch.zeros(16, 4), torch.tensor([3, -100])
    >>> ya.linear_cross_entropy(x, weight, targets)            # log(16): one of two targets counts
    tensor(2.7726)
    """
    if has_torch_function((x, weight)):  # the planner's mode: what would be done on a GPU
        result: Tensor = handle_torch_function(
            linear_cross_entropy, (x, weight), x, weight, targets, ignore_index=ignore_index, chunk=chunk
        )
        return result
    rows, labels = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if chunk is None:
        chunk = rows_at_once(rows, weight, device=device)
    elif chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk={chunk}, expected 1 row or more")
    if chunk >= len(rows) or transforms_active():
        scores = linear(rows, weight).to(torch.promote_types(rows.dtype, torch.float32))
        return F.cross_entropy(scores, labels, ignore_index=ignore_index, reduction="sum")
    # a compiled graph is made before the slots of its backward are known
    found = None if torch.compiler.is_compiling() else destination(weight)
    how = found, ignore_index, chunk, torch.is_grad_enabled()
    total: Tensor = Chunked.apply(rows, weight, labels, *how)  # type: ignore[no-untyped-call]
    return total


def rows_at_once(x: Tensor, weight: Tensor, *, device: str) -> int:
    """Returns the default rows of a chunk on this type of device; all chunks have about one size."""
    nbytes, least = ON_CPU if device == "cpu" else ELSEWHERE
    rows = x.shape[:-1].numel()
    most = max(least, nbytes // (len(weight) * max(4, x.dtype.itemsize)))
    return math.ceil(rows / math.ceil(rows / most)) if rows else 1


# ---- The autograd nodes of `linear` and `embedding`.


class _Linear(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, found: Destination) -> Tensor:
        ctx.found = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight, bias)
        # a view that a Function returns cannot be written in place, as by nn.ReLU(inplace=True)
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # of an output that the loss does not use
            return None, None, None, None
        (x, weight), found, (wants_x, _, wants_bias, _) = ctx.saved_tensors, ctx.found, ctx.needs_input_grad
        outs, ins = weight.shape
        rows = grad.reshape(-1, outs)
        grad_x = torch.mm(rows, weight).view(x.shape) if wants_x else None
        grad_bias = rows.sum(0) if wants_bias else None
        x = x.reshape(-1, ins)
        grad_weight, task = None, found.task
        # `found.takes`, without a call: a layer has many products
        if task is not None and task.number == graph_task_id() and found.state != "early":
            found.write_mm(rows.t(), x)
        else:
            grad_weight = torch.mm(rows.t(), x)
        return grad_x, grad_weight, grad_bias, None


class _Embedding(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, found: Destination) -> Tensor:
        ctx.found, ctx.count = found, len(weight)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (tokens,), found = ctx.saved_tensors, ctx.found
        rows = grad.flatten(0, -2) if grad.ndim > 1 else grad[None]
        if not found.takes:
            return None, torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.count, -1, False), None
        found.write_rows(tokens.flatten(), rows)
        return None, None, None
