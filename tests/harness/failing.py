"""A small model whose blocks can be told to fail, and the runs that the tests compare bit by bit.

    embed -> layers[0] -> layers[1] -> layers[2] -> head -> loss

Sizes are odd, so that no leaf is divisible by a number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.groups import breakable, outcome

V, E, L = 11, 5, 3

TX = ya.optim.adamw(1e-2)

LossFn = Callable[[Any, Any], Any]


def params() -> dict[str, Any]:
    return {
        "embed": {"w": ya.Param((V, E))},
        "head": {"w": ya.Param((E, V))},
        "layers": ya.Stacked({"b": ya.Param((L, E)), "w": ya.Param((L, E, E))}),
    }


def batch(rank: int = 0, rows: int = 4) -> dict[str, Tensor]:
    """tokens, targets: [B, S]."""
    tokens = torch.randint(0, V, (rows, 3), generator=torch.Generator().manual_seed(rank))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


class Planned(Exception):
    """The failure that a test asked for."""


class Fault:
    """Counts what the blocks of a step do, forward and backward, and raises at one of these events.

    at: number of the event that raises, None for never; error: what it raises; before: called first
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self.error: type[BaseException] = Planned
        self.before: Callable[[], None] = lambda: None
        self.events: list[str] = []

    def arm(self, at: int | None) -> None:
        """Starts counting anew."""
        self.at = at
        self.events = []

    def event(self, what: str) -> None:
        self.events.append(what)
        if self.at == len(self.events) - 1:
            self.before()
            raise self.error(f"planned: {what}")


class _Tap(torch.autograd.Function):
    """The identity; reports its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, what: str) -> Tensor:
        ctx.fault = fault
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.fault.event(f"backward {ctx.what}")
        return grad, None, None


def tapped(fault: Fault | None, what: str, x: Tensor) -> Tensor:
    if fault is None:
        return x
    fault.event(f"forward {what}")
    return _Tap.apply(x, fault, what)


def embed(w: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, w["w"])


def layer(x: Tensor, w: Any) -> tuple[Tensor, None]:
    return x + torch.tanh(x @ w["w"] + w["b"]), None


def head(w: Any, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ w["w"]).flatten(0, 1), targets.flatten())


def with_ends(
    middle: Callable[[Any, Tensor], Any],
    first: Callable[..., Tensor] = embed,
    last: Callable[..., Tensor] = head,
) -> LossFn:
    """The model's loss with `middle(tree, x)` between the embedding and the head."""

    def loss(tree: Any, data: Any) -> Tensor:
        x = middle(tree, ya.apply(first, tree["embed"], data["tokens"]))
        return ya.apply(last, tree["head"], x, data["targets"])

    return loss


def loss_with(fault: Fault | None = None) -> LossFn:
    """The model's loss; its blocks report to `fault`."""

    def embed_block(w: Any, tokens: Tensor) -> Tensor:
        return tapped(fault, "embed", embed(w, tokens))

    def layer_block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return tapped(fault, "layer", layer(x, w)[0]), None

    def head_block(w: Any, x: Tensor, targets: Tensor) -> Tensor:
        return tapped(fault, "head", head(w, x, targets))

    return with_ends(lambda tree, x: ya.scan(layer_block, x, tree["layers"])[0], embed_block, head_block)


loss = loss_with()


# ---- losses that visit other units


def headless(tree: Any, data: Any) -> Tensor:
    """One visit fewer."""
    x = ya.apply(embed, tree["embed"], data["tokens"])
    return ya.scan(layer, x, tree["layers"])[0].sum()


def longer(tree: Any, data: Any) -> Tensor:
    """One visit more."""
    return loss(tree, data) + ya.apply(lambda w: w["w"].square().sum(), tree["head"])


@with_ends
def backwards(tree: Any, x: Tensor) -> Any:
    return ya.scan(layer, x, tree["layers"], reverse=True)[0]


def state(mesh: Any = None, tx: Any = TX, precision: ya.Precision | None = None) -> ya.ShardedState:
    """A fresh state, always the same; without `mesh`, on this process alone."""
    mesh = ya.mesh(device="cpu") if mesh is None else mesh
    return ya.init(params(), tx, mesh=mesh, seed=0, precision=precision or ya.Precision())


class Steps:
    """One rank's steps on a mesh that a test may break, some of which are behind it.

    ranks = Steps(loss, 2)
    ranks.said(SOON)  # how the third one ends
    """

    def __init__(self, loss: LossFn, behind: int = 0, mesh: Any = None, tx: Any = TX, **options: Any) -> None:
        mesh = breakable() if mesh is None else mesh
        self.batch = batch(mesh.get_local_rank())
        self.now = state(mesh, tx)
        self.step = ya.train_step(loss, tx, **options)
        for _ in range(behind):
            self.take()

    def take(self) -> None:
        self.now, _ = self.step(self.now, self.batch)

    def said(self, seconds: float | None = None) -> str:
        """How a step ends. seconds: that it waits for ranks that do not come"""
        return outcome(self.take, seconds)


def plain(tx: Any = TX) -> ya.PlainState:
    return ya.PlainState.create(params(), tx, seed=0)


def bits(of: ya.ShardedState) -> list[Tensor]:
    """Every tensor of a state, this rank's part, copied."""
    return [leaf.clone() for leaf in optree.tree_leaves((of.params, of.opt_state)) if isinstance(leaf, Tensor)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
