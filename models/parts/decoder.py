"""A decoder as plain functions of a tree of weights: the same code runs on full tensors and on a sharded state.

    x = ya.apply(embed, params.embed, tokens)                          # [B, S] -> [B, S, E]
    x, _ = ya.scan(block(config), x, params.layers)                    # L times [B, S, E] -> [B, S, E]
    return ya.apply(head_loss(config), params.head, x, targets)        # sum of cross entropies, number of targets

`Decoder` holds the functions that distinguish a family of models, and derives everything else from them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts.attention import Cache, Positions, halves, seen, starts_of
from models.parts.axes import NONE, Axes, acting_on, cross_entropy, in_order
from models.parts.config import Shape
from models.parts.scores import Scored, scored
from models.parts.tree import Batch, Extra, Parts, Weights, must_be_alike, must_be_read

C = TypeVar("C", bound=Shape)


@dataclasses.dataclass(frozen=True)
class Decoder(Generic[C]):
    """A family of models, defined by its own functions."""

    embed: Callable[[Weights, Tensor, Tensor], Tensor]
    """`(weights, tokens [B, S], positions [S] or [B, S]) -> x [B, S, E]`"""
    table: Callable[[C, Tensor, torch.dtype], Positions]
    """`(config, positions, dtype)` -> the layers' `Positions`, without the mask."""
    layer: Callable[[C, Weights, Tensor, Positions, Cache | None], tuple[Tensor, Any]]
    """`(config, weights, x [B, S, E], at, cache) -> (x, y)`; y, [B, ...] leaves or None, is for `extra`."""
    last: Callable[[C, Any, Tensor], tuple[Tensor, Tensor]]
    """`(config, weights, x) -> (x, matrix [V, E])`, the factors of the head. weights: see `head`"""
    kv: Callable[[C], tuple[int, int]]
    """Number and width of key/value heads, for the cache."""
    window: Callable[[C], int | None] = lambda config: None
    """Positions that a query sees, itself included. None: all."""
    extra: Callable[[C, Any, Tensor], Extra] | None = None
    """`(config, ys stacked [L, B, ...], targets [B, S])` -> the layers' addition to the loss."""
    splits: tuple[str, ...] = ()
    """Axes over which the family's `params` splits leaves, `tensor` and `expert`; with any `embed`, `layer` and `last`
    take `axes=`."""
    embedding: str = "weight"
    """Name of the embedding's matrix [V, E]."""
    axes: Axes = NONE
    """The axes of the mesh that it is computed over: see `over`."""

    def over(self, axes: Axes) -> Decoder[C]:
        """Returns the same family computed over these axes. Raises NotImplementedError for one that it is not split
        over."""
        if axes == self.axes:
            return self
        axes.must_split(*self.splits)
        if not self.splits:
            return dataclasses.replace(self, axes=axes)
        parts = {name: functools.partial(getattr(self, name), axes=axes) for name in ("embed", "layer", "last")}
        return dataclasses.replace(self, **parts, axes=axes)  # type: ignore[arg-type]

    def positions(
        self, config: C, first: int, end: int, like: Tensor, starts: Int[Tensor, "B S"] | None = None
    ) -> Positions:
        """Returns the positions first .. end - 1 of tokens. like: of the device and dtype of layers; starts: the index
        of each token's position 0, before which it sees nothing
        """
        at = self.axes.places(first, end, like.device)
        table = self.table(config, at if starts is None else at - starts, like.dtype)
        if self.axes.context:
            return table._replace(halves=halves(end - first, starts, self.window(config), like))
        return table._replace(mask=seen(end - first, end, starts, self.window(config), like.device))

    def block(self, config: C) -> Callable[..., tuple[Tensor, Any]]:
        """Returns one layer as a body of `ya.scan`: `f(x, w) -> (x, y)`, or `f(x, w, at)` with positions in `consts`.

        Without these each visit makes those of positions 0 .. S-1 (38 us of a CPU thread at S = 256, D = 64).
        """

        def f(x: Float[Tensor, "B S E"], w: Weights, at: Positions | None = None) -> tuple[Tensor, Any]:
            length = x.shape[1] * (self.axes.ranks if self.axes.sequence else 1)
            return self.layer(config, w, x, at or self.positions(config, 0, length, x), None)

        return f

    def head(self, config: C) -> Callable[[Any, Tensor], Tensor]:
        """Returns `f(weights, x) -> logits`, [B, S, E] -> [B, S, V] in the dtype of `x`.

        `weights` is the head's unit, or `(head, embed)` when the config is tied; `head_unit` picks it from a tree.
        """

        def f(weights: Any, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S V"]:
            return self._scores(*self.last(config, weights, x))

        return f

    def _scores(self, x: Tensor, matrix: Tensor) -> Tensor:
        scores = ya.linear(x, matrix)
        return ya.all_gather(scores, "tensor", axis=-1, tiled=True) if self.axes.tensor else scores

    def head_unit(self, config: C, params: Parts) -> Any:
        """Returns the unit for `ya.apply(head(config), ...)`: the head, with the embedding if that is tied."""
        return (params.head, params.embed) if config.tied else params.head

    def head_loss(self, config: C) -> Callable[[Any, Tensor, Tensor], ya.Mean]:
        """Returns `f(weights, x, targets) -> ya.Mean`: the summed cross entropy of the targets that are not -100, and
        their number.

        `weights` as for `head`. The sum is in fp32 at least. Large logits never exist as a whole: see
        `ya.linear_cross_entropy`.
        """

        def f(weights: Any, x: Float[Tensor, "B S E"], targets: Int[Tensor, "B S"]) -> ya.Mean:
            entropy = cross_entropy if self.axes.tensor else ya.linear_cross_entropy
            total = entropy(*self.last(config, weights, x), targets)
            return ya.Mean(total, (targets != -100).sum())

        return f

    def loss(
        self,
        config: C,
        *,
        chunks: int = 1,
        unroll: int = 1,
        layer: Callable[..., tuple[Tensor, Any]] | None = None,
        has_aux: bool = False,
        bare: bool = False,
        axes: Axes | None = None,
    ) -> Callable[[Parts, Batch], Any]:
        """Returns `loss_fn(params, batch)` for `ya.train_step` and `ya.eval_step`: `ya.Mean` of the cross entropy, and
        of the family's addition to it.

        `batch` has `tokens` and `targets`, both [B, S] integers. Targets are the next tokens, shifted by the caller;
        -100 marks those that do not count. With `documents`, a row's consecutive positions with one number are a
        document: attention stays inside it, and its positions begin at 0. Over `context` it has `places`, as
        `axes.shard_batch` gives them. Other keys are refused. Large logits never exist as a whole: see
        `ya.linear_cross_entropy`.

        chunks: microbatches in layer-major order, gathering and reducing a layer once for all of them (`ya.chunk`
            around the block and around the head). B must be a multiple. Costs a second forward of every block and of
            the head, in the backward, and every layer's input for all B rows; only the current chunk's graph is kept.
            Pair it with `ya.schedules.remat.none`: a visit that recomputes as well runs its block a third time
        unroll: layers gathered, visited and reduced as one (`ya.scan`): for layers so small that a message costs more
            than its bytes
        layer: replaces `block(config)`: the same through `torch.compile`, say
        has_aux: return `(mean, aux)`: a dict of the layers' further outputs, empty for most families
        bare: the cross entropy alone, for evaluations
        axes: those of the mesh that layers are computed over, `tensor` as `params` has it; split batches with
            `axes.shard_batch`. None: those of `over`

        Raises ValueError for chunks < 1 and, when called, for a B that is no multiple of `chunks`, and for other keys.
        """
        if axes is not None and axes != self.axes:
            return self.over(axes).loss(config, chunks=chunks, unroll=unroll, layer=layer, has_aux=has_aux, bare=bare)
        body = layer or self.block(config)
        alike, apart = (ya.chunk(body, chunks, in_axes=(0, None, axis)) for axis in (None, 0))
        last = ya.chunk(self.head_loss(config), chunks, in_axes=(None, 0, 0))

        def loss_fn(params: Parts, batch: Batch) -> Any:
            must_be_read(batch, ("places",) * self.axes.context)
            self.axes.must_be_dealt(batch)
            documents = batch.get("documents")
            targets = batch["targets"]
            f = alike if documents is None else apart  # whose positions are each row's own
            x, ys = self._hidden(config, params, batch["tokens"], documents, f, unroll)
            mean: ya.Mean = ya.apply(last, self.head_unit(config, params), x, targets)
            extra = None if self.extra is None else self.extra(config, ys, targets)
            if extra is not None and not bare:
                mean = ya.Mean(mean.total + extra.total, mean.weight)
            return (mean, {} if extra is None else extra.aux) if has_aux else mean

        return loss_fn

    def logits(
        self, config: C, params: Parts, tokens: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S V"]:
        """Returns scores of the next token at every position, in the dtype of the weights: over `context` at those of
        this rank. documents: as in `loss`"""
        with acting_on(params):
            x, _ = self._hidden(config, params, tokens, documents, self.block(config))
            return self.scores(config, params, x)

    @torch.no_grad()
    def score(self, config: C, params: Parts, tokens: Int[Tensor, "B S"], targets: Int[Tensor, "B S"]) -> Scored:
        """Scores each target after the tokens up to it; targets of -100 are left out."""

        def f(weights: Any, x: Float[Tensor, "B S E"]) -> Scored:
            return scored(*self.last(config, weights, x), targets, self._scores)

        must_be_alike(tokens, targets)
        with acting_on(params):
            x, _ = self._hidden(config, params, tokens, None, self.block(config))
            found: Scored = ya.apply(f, self.head_unit(config, params), x)
        return found

    def _hidden(
        self,
        config: C,
        params: Parts,
        tokens: Int[Tensor, "B S"],
        documents: Int[Tensor, "B S"] | None,
        layer: Callable[..., tuple[Tensor, Any]],
        unroll: int = 1,
    ) -> tuple[Float[Tensor, "B S E"], Any]:
        if documents is not None and documents.shape != tokens.shape:
            got = f"{tuple(documents.shape)}, tokens {tuple(tokens.shape)}"
            raise ValueError(f"documents have the shape {got}: expected a number for each token")
        self.axes.check(config, tokens.shape[1])
        starts = None if documents is None else self._starts(documents)
        x = self.embedded(config, params, tokens, 0, starts)
        at = self.positions(config, 0, tokens.shape[1], x, starts)
        out: tuple[Tensor, Any] = ya.scan(layer, x, params.layers, unroll=unroll, consts=at)
        return out

    def _starts(self, documents: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        if not self.axes.context:
            return starts_of(documents)
        at = self.axes.places(0, documents.shape[1], documents.device)
        return starts_of(in_order(documents))[:, at]

    def embedded(self, config: C, params: Parts, tokens: Tensor, first: int, starts: Tensor | None) -> Tensor:
        """Returns the first layer's input for tokens at positions from `first` on. starts: as in `positions`. Raises
        ValueError if there are too few positions."""
        at = self.axes.places(first, first + tokens.shape[1], tokens.device)
        S = len(at) * (ya.axis_size("context") if self.axes.context else 1)
        longest = config.longest
        if longest is not None and first + S > longest:
            raise ValueError(
                f"positions {first} to {first + S - 1}: this model has {longest} of them (max_length); shorten the "
                f"sequence"
            )

        def embed(w: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
            if isinstance(w[self.embedding], ya.Lazy):
                raise TypeError("weights are lazy, as models.hf.load gives them: ya.shard or ya.materialize reads them")
            if self.splits:
                self.axes.must_have("embedding", len(w[self.embedding]), config.vocab)
            return self.embed(w, tokens, positions)

        x: Tensor = ya.apply(embed, params.embed, tokens, at if starts is None else at - starts)
        return x

    def scores(self, config: C, params: Parts, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S V"]:
        """Applies the head to the last layer's output."""
        out: Tensor = ya.apply(self.head(config), self.head_unit(config, params), x)
        return out
