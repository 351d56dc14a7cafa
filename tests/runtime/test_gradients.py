"""Blocks that ask for gradients of their own, bear hooks, or checkpoint: what ya.linear writes into slots is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, global_batch, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import IGNORED, SCHEDULES, TX, Batch, Head, Layer, Params, base_params
from yafsdp_fn.nn.linear import AutogradRun
from yafsdp_fn.pipelines.session import Later
from yafsdp_fn.runtime.recompute import differentiated
from yafsdp_fn.runtime.shards import GradSlot, UnitViews
from yafsdp_fn.runtime.slots import weight_leaf
from yafsdp_fn.runtime.visit import ToSlots, grad_targets_of

ROWS = 6
Block = Callable[[Tensor, Layer], Tensor]


def own(x: Tensor, w: Layer) -> Tensor:
    return x + w.gate * ya.linear(torch.tanh(ya.linear(x, w.up, w.bias)), w.down)


def several_uses(x: Tensor, w: Layer) -> Tensor:
    """A weight straight, twice, by torch's operations, and through views."""
    h = torch.tanh(ya.linear(2 * x, w.up)) + torch.tanh(x @ w.up.T) + ya.linear(x, w.down.t())
    return own(x + w.gate * ya.linear(h, w.down) + ya.linear(x, w.up[:1]), w)


def slope(x: Tensor, w: Layer, *, create_graph: bool = False, of_weight: bool = False, chunks: int = 1) -> Tensor:
    """The gradient of a function of x and w.up with respect to one of them, asked for inside the block."""
    squares = ya.chunk(lambda x, up: torch.tanh(ya.linear(x, up)).square(), chunks, in_axes=(0, None))
    with torch.enable_grad():
        x, up = (t if t.requires_grad else t.detach().requires_grad_() for t in (x, w.up))
        return torch.autograd.grad(squares(x, up).sum(), up if of_weight else x, create_graph=create_graph)[0]


def inner(x: Tensor, w: Layer) -> Tensor:
    return own(x + 0.1 * slope(x, w), w)


def inner_twice(x: Tensor, w: Layer) -> Tensor:
    return own(x + 0.1 * slope(x, w, create_graph=True), w)


def inner_of_weight(x: Tensor, w: Layer) -> Tensor:
    """Its numbers are not used: they are sums over the rows, which ranks share."""
    of_chunks = slope(x.detach(), w, of_weight=True, chunks=2)
    return own(x + 0.0 * (slope(x, w, create_graph=True, of_weight=True) + of_chunks).sum(), w)


def inner_func(x: Tensor, w: Layer) -> Tensor:
    return own(x + 0.1 * torch.func.grad(lambda x: torch.tanh(ya.linear(x, w.up)).square().sum())(x), w)


def hooked(x: Tensor, w: Layer) -> Tensor:
    if w.up.requires_grad:
        w.up.register_hook(lambda grad: 3 * grad)
    return own(x, w)


class Again(torch.autograd.Function):
    """tanh of a linear map, whose backward runs it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, up)
        return torch.tanh(x @ up.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, up = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(ya.linear(x, up)), (x, up), grad)


def again(x: Tensor, w: Layer) -> Tensor:
    return own(x + w.gate * ya.linear(Again.apply(x, w.up), w.down), w)


def checkpointed(x: Tensor, w: Layer) -> Tensor:
    out: Tensor = checkpoint(inner, x, w, use_reentrant=False)
    return out


BLOCKS: list[Block] = [
    several_uses,
    inner,
    inner_twice,
    inner_of_weight,
    inner_func,
    hooked,
    again,
    checkpointed,
]


def plain_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    total = ya.linear_cross_entropy(x * w.scale, w.out, targets, ignore_index=IGNORED, chunk=4)
    return ya.Mean(total, (targets != IGNORED).sum())


def checkpointed_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    total = checkpoint(lambda x: plain_head(w, x, targets).total, x, use_reentrant=False)
    return ya.Mean(total, (targets != IGNORED).sum())


def inner_head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    """The loss's gradient, asked for before its own backward."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(plain_head(w, y, targets).total, y)
    return plain_head(w, x + 0.1 * grad, targets)


def loss_of(block: Block, head: Any, chunks: int) -> Callable[[Params, Batch], ya.Mean]:
    def body(x: Tensor, w: Layer) -> tuple[Tensor, None]:
        return block(x, w), None

    body = ya.chunk(body, chunks, in_axes=(0, None))
    head = ya.chunk(head, chunks, in_axes=(None, 0, 0))

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(lambda table, tokens: ya.embedding(tokens, table), params.embed, batch["tokens"])
        x, _ = ya.scan(body, x, params.layers)
        mean: ya.Mean = ya.apply(head, params.head, x, batch["targets"])
        return mean

    return loss


def exact(mesh: Any, pairs: list[tuple[Block, Any]]) -> None:
    state = ya.init(base_params(3), TX, mesh=mesh)
    ranks = mesh.size()
    for block, head in pairs:
        for chunks, schedule in ((1, "zero3"), (1, "zero3-remat-all"), (3, "zero3")):
            loss = loss_of(block, head, chunks)
            what = f"{block.__name__}, {head.__name__}, {chunks} chunks, {schedule}"
            expected = ya.value_and_grad(loss)(plain(base_params(3)), global_batch(ranks, rows=ROWS))
            function = ya.value_and_grad(loss, schedule=SCHEDULES[schedule])
            for _ in range(2):
                value, grads = function(state.params, batch_of(mesh.get_rank(), rows=ROWS))
                compare((value, ya.unshard(grads)), expected, 2e-6, what)


@on_ranks(1, 2)
def test_blocks(mesh: Any) -> None:
    """Against the plain loop, recomputed or not, in chunks or not."""
    blocks = BLOCKS if mesh.size() == 1 else [several_uses, inner_twice, hooked, again, checkpointed]
    exact(mesh, [(block, plain_head) for block in blocks])


@on_ranks(1, 2)
def test_heads(mesh: Any) -> None:
    exact(mesh, [(own, checkpointed_head), (own, inner_head)])


def halves(x: Tensor, between: Callable[[Later], object], f: Callable[..., Tensor] = ya.linear) -> Tensor:
    """The gradient of a weight that `x` was multiplied with, made in a later half, after what is done between them."""
    w = weight_leaf(torch.ones(4, 5), lambda size, dtype: torch.empty(size, dtype=dtype))
    grad = torch.empty(4, 5)
    out = f(x, w)
    later = Later(())
    run = AutogradRun()
    later.open(grad_targets_of([[w]]), run)
    later.close(differentiated(run, [out], [torch.ones(3, 4)], [w]))
    between(later)
    later.write(ToSlots([GradSlot(UnitViews(grad.flatten(), [grad], []), add=False)]))
    return grad


def test_a_factor_that_is_written_between_halves_is_refused() -> None:
    """Autograd, which looks at what it has saved, is over by then."""
    x = torch.arange(15.0).reshape(3, 5)
    assert torch.equal(halves(x, lambda _: None), x.sum(0).expand(4, 5))
    with pytest.raises(RuntimeError, match=r"a tensor of 15 elements that ya\.linear .* was written in place"):
        halves(x, lambda _: x.add_(1.0))


def test_chunks_leave_no_factors_for_the_later_half() -> None:
    """Those of all chunks would be there at once."""
    left: list[int] = []
    x = torch.arange(15.0).reshape(3, 5)
    grad = halves(x, lambda later: left.append(len(later._writes)), ya.chunk(ya.linear, 3, in_axes=(0, None)))
    assert torch.equal(grad, x.sum(0).expand(4, 5))
    assert left == [0]
