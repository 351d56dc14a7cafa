"""Small models with odd sizes: abstract parameters and losses.

A problem is a name in `PROBLEMS`, so that it can travel to the ranks. Its loss runs on sharded and on plain trees.

    V = 37 tokens, E = 7 embed, F = 5 feed-forward: no leaf is divisible by anything

In each layer the gradient of `up` is written straight into its slot, and that of `down` comes by autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F_
from torch import Tensor

import yafsdp_fn as ya

V, E, F = 37, 7, 5
IGNORED = -1

Batch = dict[str, Tensor]
TX = ya.optim.adamw(1e-3)
CLIPPED = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-2, weight_decay=0.1))


class Layer(NamedTuple):
    """x + gate * down(tanh(up(x) + bias))"""

    up: Any  # [F, E]
    bias: Any  # [F]
    down: Any  # [E, F]
    gate: Any  # [E]
    size: Any  # [], used by the outputs of a scan alone: elsewhere it has no gradient


class Head(NamedTuple):
    scale: Any  # [E]
    out: Any  # [V, E]


class TiedHead(NamedTuple):
    scale: Any  # [E]; the embedding serves besides


class Params(NamedTuple):
    embed: Any  # [V, E]
    layers: Any
    head: Any
    more: Any = None


def param(*shape: int, std: float = 0.5) -> ya.Param:
    return ya.Param(shape, init=ya.params.initializers.normal(std))


def layer(*length: int, f: int = F, e: int = E) -> Layer:
    """One layer, or with a length the leaves of a stack."""
    shapes = ((f, e), (f,), (e, f), (e,), ())
    return Layer(*(param(*length, *shape) for shape in shapes))


def pinned(of_stack: Layer, *names: str) -> Layer:
    return of_stack._replace(**{name: ya.Pinned(getattr(of_stack, name)) for name in names})


def base_params(layers: int) -> Params:
    return Params(param(V, E), ya.Stacked(layer(layers)), Head(param(E), param(V, E)))


# ---- pieces of losses


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    return ya.embedding(tokens, table)


def torchs_embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Of problems whose bits on the fake GPU are those on a CPU: there, rows go into a slot by another kernel."""
    return F_.embedding(tokens, table)


def block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    return x + w.gate * (torch.tanh(ya.linear(x, w.up, w.bias)) @ w.down.T), None


def block_with_y(x: Tensor, w: Layer) -> tuple[Tensor, Tensor]:
    new, _ = block(x, w)
    return new, (w.size * new).square().sum()


def masked_loss(logits: Tensor, targets: Tensor) -> ya.Mean:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = F_.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return ya.Mean(total, (targets != IGNORED).sum())


def head(w: Head, x: Tensor, targets: Tensor) -> ya.Mean:
    return masked_loss(ya.linear(x * w.scale, w.out), targets)


def tied_head(weights: tuple[TiedHead, Tensor], x: Tensor, targets: Tensor) -> ya.Mean:
    w, table = weights
    return masked_loss(ya.linear(x * w.scale, table), targets)


# ---- losses

Loss = Callable[[Params, Batch], ya.Mean]


def with_ends(middle: Callable[..., Any], first: Callable[..., Tensor] = embed, *, sees_batch: bool = False) -> Loss:
    """The loss of a model with an embedding first, and a head last, that the batch goes through: `middle(params, x)`,
    or `middle(params, x, batch)`, is what lies between. It returns x, or also what the total has besides."""

    @functools.wraps(middle)
    def loss(params: Params, batch: Batch) -> ya.Mean:
        given = (batch,) if sees_batch else ()
        out = middle(params, ya.apply(first, params.embed, batch["tokens"]), *given)
        x, *more = out if isinstance(out, tuple) else (out,)
        total, weight = ya.apply(head, params.head, x, batch["targets"])
        return ya.Mean(sum(more, total), weight)

    return loss


with_torchs_ends = functools.partial(with_ends, first=torchs_embed)
with_ends_and_batch = functools.partial(with_ends, sees_batch=True)


@with_ends
def base_loss(params: Params, x: Tensor) -> Any:
    return ya.scan(block, x, params.layers)[0]


def tied_params(layers: int) -> Params:
    return Params(param(V, E), ya.Stacked(layer(layers)), TiedHead(param(E)))


def tied_loss(params: Params, batch: Batch) -> ya.Mean:
    """The embedding is visited first and last."""
    x = ya.apply(torchs_embed, params.embed, batch["tokens"])
    x, _ = ya.scan(block, x, params.layers)
    return ya.apply(tied_head, (params.head, params.embed), x, batch["targets"])


def stacks_params(layers: int) -> Params:
    """Two stacks whose layers differ in shape."""
    return base_params(layers)._replace(more=ya.Stacked(layer(layers + 1, f=11)))


@with_ends
def stacks_loss(params: Params, x: Tensor) -> Tensor:
    """One stack after the other, then both together: the second reads the first layers of a pair of stacks."""
    x, _ = ya.scan(block, x, params.layers)
    x, _ = ya.scan(block, x, params.more)
    return x


def pairs_params(layers: int) -> Params:
    """Two stacks of one length that are scanned together."""
    return base_params(layers)._replace(more=ya.Stacked(layer(layers, f=11)))


def pair_block(x: Tensor, w: tuple[Layer, Layer]) -> tuple[Tensor, None]:
    return block(block(x, w[0])[0], w[1])


@with_ends
def pairs_loss(params: Params, x: Tensor) -> Any:
    return ya.scan(pair_block, x, (params.layers, params.more))[0]


def frozen_params(layers: int) -> Params:
    """A frozen stack, then layers with a frozen (partly pinned) and a trained part; the embedding is frozen, too."""
    mixed = {"main": ya.frozen(pinned(layer(layers), "gate")), "side": layer(layers, f=3)}
    abstract = base_params(layers)
    return Params(ya.frozen(abstract.embed), ya.frozen(abstract.layers), abstract.head, ya.Stacked(mixed))


def mixed_block(x: Tensor, w: dict[str, Layer]) -> tuple[Tensor, None]:
    return block(x, w["main"])[0] + block(x, w["side"])[0], None


@with_torchs_ends
def frozen_loss(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(block, x, params.layers)
    x, _ = ya.scan(mixed_block, x, params.more)
    return x


def units_params(layers: int) -> Params:
    """Each layer is two units."""
    stack = {"main": layer(layers), "side": ya.Unit(layer(layers, f=11))}
    return base_params(layers)._replace(layers=ya.Stacked(stack))


@with_torchs_ends
def units_loss(params: Params, x: Tensor) -> Any:
    return ya.scan(mixed_block, x, params.layers)[0]


def pinned_params(layers: int) -> Params:
    """Layers of two units, each with a pinned one beside it; and a stack of which all is pinned but one leaf."""
    stack = {"main": pinned(layer(layers), "bias", "gate"), "side": ya.Unit(pinned(layer(layers, f=11), "gate"))}
    most = pinned(layer(layers + 1, f=3), "bias", "down", "gate", "size")
    return base_params(layers)._replace(layers=ya.Stacked(stack), more=ya.Stacked(most))


@with_torchs_ends
def pinned_loss(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(mixed_block, x, params.layers)
    x, _ = ya.scan(block, x, params.more, reverse=True)
    return x


def rich_block(x: Tensor, w: dict[str, Any], consts: tuple[Tensor, int]) -> tuple[Tensor, dict[str, Tensor]]:
    memory, divisor = consts
    x, y = block_with_y(x + w["shift"] * memory, w["layer"])
    return x, {"square": y / divisor}


@with_ends
def rich_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """xs beyond the weights, differentiable consts, outputs of every layer, in reverse."""
    memory = torch.sin(x)
    length = optree.tree_leaves(params.layers)[0].shape[0]  # of flat shards and of plain leaves alike
    xs = {"layer": params.layers, "shift": torch.linspace(0.5, 1.0, length)}
    x, ys = ya.scan(rich_block, x, xs, reverse=True, consts=(memory, 9))
    return x, (ys["square"] * torch.arange(1.0, length + 1)).sum()


@with_ends
def unrolled_loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Three layers make one visit."""
    x, ys = ya.scan(block_with_y, x, params.layers, unroll=3)
    return x, ys.sum()


@with_torchs_ends
def twice_loss(params: Params, x: Tensor) -> Tensor:
    """Every layer is visited twice, up and down again."""
    x, _ = ya.scan(block, x, params.layers)
    x, _ = ya.scan(block, x, params.layers, reverse=True)
    return x


def many_loss(params: Params, batch: Batch) -> ya.Mean:
    """Three forwards of the whole model before one backward."""
    rolled = [{key: value.roll(shift, 1) for key, value in batch.items()} for shift in range(3)]
    parts = [base_loss(params, part) for part in rolled]
    return ya.Mean(sum((part.total * k for k, part in enumerate(parts, 1)), torch.zeros(())), parts[0].weight)


def part_loss(params: Params, batch: Batch) -> ya.Mean:
    """Visits that the loss does not use: a head on the way, and the layers after the ones that count."""
    x = ya.apply(embed, params.embed, batch["tokens"])
    middle, _ = ya.scan(block, x, params.layers)
    ya.scan(block, middle, params.more)
    mean: ya.Mean = ya.apply(head, params.head, middle, batch["targets"])
    ya.apply(head, params.head, x, batch["targets"])
    return mean


def dropout_block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    return F_.dropout(block(x, w)[0], 0.3), None


@with_ends
def dropout_loss(params: Params, x: Tensor) -> Any:
    return ya.scan(dropout_block, F_.dropout(x, 0.0), params.layers)[0]


class Problem(NamedTuple):
    """params: abstract, by number of layers; revisits: whether a unit is visited more than once in a microbatch."""

    params: Callable[[int], Params]
    loss: Callable[[Params, Batch], ya.Mean]
    revisits: bool = False


PROBLEMS = {
    "base": Problem(base_params, base_loss),
    "tied": Problem(tied_params, tied_loss, revisits=True),
    "stacks": Problem(stacks_params, stacks_loss),
    "pairs": Problem(pairs_params, pairs_loss),
    "frozen": Problem(frozen_params, frozen_loss),
    "units": Problem(units_params, units_loss),
    "pinned": Problem(pinned_params, pinned_loss),
    "rich": Problem(base_params, rich_loss),
    "unrolled": Problem(base_params, unrolled_loss),
    "twice": Problem(base_params, twice_loss, revisits=True),
    "many": Problem(base_params, many_loss, revisits=True),
    "part": Problem(stacks_params, part_loss, revisits=True),
    "dropout": Problem(base_params, dropout_loss),
}

remat = ya.schedules.remat
zero2 = ya.schedules.zero2
zero3 = ya.schedules.zero3
SCHEDULES: dict[str, ya.schedules.Schedule] = {
    "zero3": zero3(),
    "zero3-demand": zero3(prefetch=0),
    "zero3-far": zero3(prefetch=3),
    "zero3-resident": zero3(resident=1, prefetch=2),
    "zero3-remat-first": zero3(remat=remat.first(1)),
    "zero3-remat-every": zero3(remat=remat.every(2), prefetch=2),
    "zero3-remat-all": zero3(remat=remat.all),
    "zero2": zero2(),
    "zero2-remat-all": zero2(prefetch=0, remat=remat.all),
}
