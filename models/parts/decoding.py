"""Decodes token by token, with a key/value cache that is written in place.

cache = init_cache(decoder, config, batch, length) scores = decode(decoder, config, params, prompts, cache, 0)
# [B, S] -> [B, S, V] scores = decode(decoder, config, params, tokens, cache, S)               # [B, 1] at the next
position
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts.attention import Cache, Positions
from models.parts.axes import acting_on
from models.parts.config import Shape
from models.parts.decoder import Decoder
from models.parts.tree import Parts, Weights

C = TypeVar("C", bound=Shape)


def cached_block(
    decoder: Decoder[C], config: C
) -> Callable[[Tensor, tuple[Weights, Cache], Positions], tuple[Tensor, None]]:
    """Returns one decoding layer, `f(x, (w, cache), at) -> (x, None)`, for `ya.scan` under `torch.no_grad`.

    `cache` ends with the positions of `x`: its last S entries are overwritten, and `x` attends to all of it.
    """

    def f(x: Float[Tensor, "B S E"], xs: tuple[Weights, Cache], at: Positions) -> tuple[Tensor, None]:
        w, cache = xs
        return decoder.layer(config, w, x, at, cache)[0], None

    return f


def init_cache(
    decoder: Decoder[C],
    config: C,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    ranks: int = 1,
) -> Cache:
    """Makes an empty cache for `length` positions, [L, B, K, length, D]; `dtype` is that of the weights used
    with it. ranks: T, of `tensor`, of which each has K / T of the heads"""
    heads, width = decoder.kv(config)
    shape = (config.layers, batch, heads // ranks, length, width)
    return Cache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


@torch.no_grad()
def decode(
    decoder: Decoder[C],
    config: C,
    params: Parts,
    tokens: Int[Tensor, "B S"],
    cache: Cache,
    position: int,
    *,
    padding: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B S V"]:
    """Returns scores after each of `tokens`, at `position`, `position + 1`, ...; writes their keys and values to
    `cache`, in place, so that the next call continues at `position + S`.

    A prompt is one call at position 0 (S > 1), each further token one call (S = 1). The window of a call grows with
    `position`: no work is spent on the empty rest of the cache, and a compiled block sees dynamic shapes.

    padding: tokens in front of each row's text, the same in all calls: prompts of several lengths end together, and
        each text's positions begin at 0

    Over axes, `decode(llama.over(axes), ...)`: ranks of `tensor` have the same rows, and scores of all tokens; those of
    `expert` have rows of their own, and as many calls. `sequence` makes no difference, since positions come one by one.
    Raises NotImplementedError with `context`.
    """
    if decoder.axes.context:
        raise NotImplementedError(
            "decode: over context, keys and values would be on several ranks; give it a family without: "
            "over(dataclasses.replace(axes, context=False)). Ranks of context then do the same"
        )
    decoder = decoder.over(dataclasses.replace(decoder.axes, sequence=False))
    with acting_on(params):
        return _decode(decoder, config, params, tokens, cache, position, padding)


def _decode(
    decoder: Decoder[C],
    config: C,
    params: Parts,
    tokens: Int[Tensor, "B S"],
    cache: Cache,
    position: int,
    padding: Int[Tensor, " B"] | None,
) -> Float[Tensor, "B S V"]:
    _, batch, heads, length, _ = cache.k.shape
    ranks = decoder.axes.ranks
    if heads * ranks != decoder.kv(config)[0]:
        raise ValueError(
            f"decode: the cache has {heads} heads of keys, and there are {decoder.kv(config)[0]} over {ranks} ranks of "
            f"tensor; pass init_cache ranks={ranks}"
        )
    end = position + tokens.shape[1]
    if not 0 <= position < end <= length:
        raise ValueError(
            f"decode: tokens at positions {position} to {end - 1} do not fit a cache of {length} positions; "
            f"make a longer one with init_cache, or start again with the last tokens at position 0"
        )
    if tokens.shape[0] != batch:
        raise ValueError(f"decode: {tokens.shape[0]} sequences of tokens, but the cache was made for {batch}")
    starts = None
    if padding is not None and padding.shape != (batch,):
        raise ValueError(f"decode: padding has the shape {tuple(padding.shape)}: expected a number for each of {batch}")
    if padding is not None:  # padding is another document: it sees itself, and nothing sees it
        at = torch.arange(position, end, device=tokens.device)
        starts = torch.where(at >= padding[:, None], padding[:, None], 0)
    x = decoder.embedded(config, params, tokens, position, starts)
    if cache.k.dtype != x.dtype:
        raise TypeError(
            f"decode: the cache is {cache.k.dtype}, the weights are {x.dtype}; pass init_cache dtype={x.dtype}"
        )
    window = Cache(cache.k[..., :end, :], cache.v[..., :end, :])
    stand = decoder.positions(config, position, end, x, starts)
    x, _ = ya.scan(cached_block(decoder, config), x, (params.layers, window), consts=stand)
    return decoder.scores(config, params, x)
