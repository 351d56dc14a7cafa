"""Models of layers of unlike kinds and sizes: one rule for all their layers is wrong.

Every model is built of the same three blocks, on whole tensors, and runs on a few CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import yafsdp_fn as ya

Kind = Literal["global", "local", "experts"]
Tree = dict[str, Any]


class Sizes(NamedTuple):
    """E features, F of a feed-forward, H heads, V words, S positions, X experts; window: of local attention."""

    E: int = 16
    F: int = 24
    H: int = 2
    V: int = 40
    S: int = 16
    X: int = 4
    window: int = 4


# ---- Three kinds of layers. x: [B, S, E]


def attention(x: Tensor, w: Tree, heads: int, window: int) -> Tensor:
    """Causal attention within windows of so many positions."""
    b, s, e = x.shape
    q, k, v = ya.linear(x, w["qkv"]).view(b * (s // window), window, 3, heads, e // heads).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return ya.linear(out.transpose(1, 2).reshape(b, s, e), w["out"])


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def layer(kind: Kind, of: Sizes) -> Callable[[Tensor, Tree], tuple[Tensor, None]]:
    """A block: attention over all positions or in windows, and then a feed-forward, or experts that share positions
    evenly."""

    def block(x: Tensor, w: Tree) -> tuple[Tensor, None]:
        x = x + attention(normed(x), w, of.H, of.S if kind == "global" else of.window)
        if kind != "experts":
            return x + ya.linear(F.silu(ya.linear(normed(x), w["up"])), w["down"]), None
        # each expert has an equal part of the positions
        b, s, e = x.shape
        parts = normed(x).view(b, of.X, s // of.X, e).transpose(0, 1).reshape(of.X, b * s // of.X, e)
        hidden = F.silu(torch.bmm(parts, w["ups"].transpose(1, 2)))
        made = torch.bmm(hidden, w["downs"].transpose(1, 2)).view(of.X, b, s // of.X, e)
        return x + made.transpose(0, 1).reshape(b, s, e), None

    return block


def weights(kind: Kind, count: int, of: Sizes) -> Any:
    shapes: dict[str, tuple[int, ...]] = {"qkv": (3 * of.E, of.E), "out": (of.E, of.E)}
    if kind == "experts":
        shapes |= {"ups": (of.X, of.F, of.E), "downs": (of.X, of.E, of.F)}
    else:
        shapes |= {"up": (of.F, of.E), "down": (of.E, of.F)}
    init = ya.params.initializers.normal(0.02)
    return ya.Stacked({name: ya.Param((count, *shape), init=init) for name, shape in shapes.items()})


class Model(NamedTuple):
    """A model of unlike layers. layers: kinds, with how many of each follow each other"""

    layers: tuple[tuple[Kind, int], ...]
    sizes: Sizes = Sizes()

    def params(self) -> Tree:
        of = self.sizes
        stacks = {f"{kind}_{k}": weights(kind, count, of) for k, (kind, count) in enumerate(self.layers)}
        words = ya.Param((of.V, of.E), init=ya.params.initializers.normal(0.02))
        return {"embed": ya.Unit({"table": words}), **stacks, "head": ya.Unit({"out": words})}

    def loss(self, params: Tree, batch: Tree) -> ya.Mean:
        x = ya.apply(lambda w, tokens: ya.embedding(tokens, w["table"]), params["embed"], batch["tokens"])
        for k, (kind, _) in enumerate(self.layers):
            x, _ = ya.scan(layer(kind, self.sizes), x, params[f"{kind}_{k}"])
        return ya.apply(_head, params["head"], x, batch["targets"])

    def batch(self, rows: int, device: str = "meta") -> Tree:
        """The batch of one rank."""
        tokens = torch.arange(rows * self.sizes.S, device=device).view(rows, self.sizes.S) % self.sizes.V
        return {"tokens": tokens, "targets": tokens}


def _head(w: Tree, x: Tensor, targets: Tensor) -> ya.Mean:
    return ya.Mean(ya.linear_cross_entropy(normed(x), w["out"], targets), targets.numel())


EVEN = Model((("global", 7),))
MODELS = {
    "local-global": Model((("local", 5), ("global", 1)) * 3),
    "experts": Model((("local", 1), ("experts", 1)) * 3),
    "half-the-gradients": EVEN,
    "few-microbatches": EVEN,
}
"""Models of steps on which one rule for all layers is wrong."""
