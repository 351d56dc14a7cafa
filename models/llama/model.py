"""Llama as plain functions of a tree of weights: the same code runs on full tensors and on a sharded state.

    x = ya.apply(embed, params.embed, tokens)                          # [B, S] -> [B, S, E]
    x, _ = ya.scan(block(config), x, params.layers)                    # L times [B, S, E] -> [B, S, E]
    return ya.apply(head_loss(config), params.head, x, targets)        # sum of cross entropies, number of targets

- grouped-query attention (K = H: multi-head), `head_dim` free of E / H
- rotary positions by halves, as Hugging Face has them (Meta's own files rotate adjacent pairs), with 3.1's scaling
- RMSNorm before each sublayer, SwiGLU, no biases, tied or untied head
- cross entropy in fp32; targets of -100 do not count
- decoding with a key/value cache that is written in place

Axes: L layers, B batch, S sequence, T cached positions, E embed, H query heads, K key/value heads, D head dim,
F feed-forward, V vocabulary. Weights carry Hugging Face's names and orientation, [out, in], and activations the dtype
of the weights: angles, norms and the loss are computed in fp32 inside, nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.llama.config import Config
from yafsdp_fn.params.initializers import normal, ones

Weights = Mapping[str, Tensor]
"""One unit's leaves. `block` sees one layer's, without the layer axis."""


class Llama(NamedTuple):
    """Three units' worth of parameters; also the tree of anything else that is kept per part, such as name prefixes."""

    embed: Any
    layers: Any
    head: Any


class Rope(NamedTuple):
    """What turns queries and keys, for each position; the leading axes are those of the positions."""

    cos: Float[Tensor, "*#B S 1 D"]
    sin: Float[Tensor, "*#B S 1 D"]


class Cache(NamedTuple):
    """Keys (turned already) and values of the positions so far, for all layers or for one."""

    k: Float[Tensor, "*L B K T D"]
    v: Float[Tensor, "*L B K T D"]


def params(config: Config, *, pin_norms: bool = False) -> Llama:
    """The parameters, described once: `ya.init`, `ya.materialize` and `hf` derive everything from this tree.

    Matrices start normal(0.02), the two that write to the residual stream at 0.02 / sqrt(2 L), so that the stream's
    variance does not grow with depth; norms start at one. With a tied head there is no `lm_head.weight`.

    pin_norms: the layers' norm gains, of all layers, make one unit that is gathered once per step (`ya.Pinned`)
    """
    V, E, F_, L = config.vocab, config.embed, config.ffn, config.layers
    Q, KV = config.heads * config.head_dim, config.kv_heads * config.head_dim
    residual = normal(0.02 / math.sqrt(2 * L))
    gain: Any = ya.Param((L, E), init=ones)
    gain = ya.Pinned(gain) if pin_norms else gain
    layer = {
        "input_layernorm.weight": gain,
        "self_attn.q_proj.weight": ya.Param((L, Q, E)),
        "self_attn.k_proj.weight": ya.Param((L, KV, E)),
        "self_attn.v_proj.weight": ya.Param((L, KV, E)),
        "self_attn.o_proj.weight": ya.Param((L, E, Q), init=residual),
        "post_attention_layernorm.weight": gain,
        "mlp.gate_proj.weight": ya.Param((L, F_, E)),
        "mlp.up_proj.weight": ya.Param((L, F_, E)),
        "mlp.down_proj.weight": ya.Param((L, E, F_), init=residual),
    }
    head = {"model.norm.weight": ya.Param((E,), init=ones)}
    if not config.tied:
        head["lm_head.weight"] = ya.Param((V, E))
    return Llama(embed={"weight": ya.Param((V, E))}, layers=ya.Stacked(layer), head=head)


def embed(w: Weights, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "B S E"]:
    """The tokens' rows of the embedding; Llama does not scale them."""
    return ya.embedding(tokens, w["weight"])


def rotary(config: Config, positions: Int[Tensor, "*B S"], dtype: torch.dtype) -> Rope:
    """The table for `positions`, made once per forward and read by every layer (`consts` of the scan).

    Angles are fp32 whatever `dtype` is: in bf16, positions past 256 would already collide.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if (scaling := config.rope_scaling) is not None:
        turns = frequencies * scaling.original_max_length / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        frequencies = frequencies * (keep + (1.0 - keep) / scaling.factor)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    signed = torch.stack([-sin, sin])
    return Rope(repeat(cos, "... D -> ... (half D)", half=2), rearrange(signed, "half ... D -> ... (half D)"))


def _turn(x: Float[Tensor, "B S H D"], rope: Rope) -> Float[Tensor, "B S H D"]:
    # (a, b) -> (a cos - b sin, b cos + a sin); with the sign inside the table the swap of halves is one copy, and
    # forward and backward take 0.75 of the time of chunk, negate and concatenate, with the same bits.
    return x * rope.cos + x.roll(x.shape[-1] // 2, -1) * rope.sin


def _norm(config: Config, w: Tensor, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
    # fp32 inside. In bf16 Hugging Face rounds once more, before the weight.
    return F.rms_norm(x, (config.embed,), w, config.norm_eps)


def _attention(
    config: Config, w: Weights, x: Float[Tensor, "B S E"], rope: Rope, cache: Cache | None
) -> Float[Tensor, "B S E"]:
    heads = (*x.shape[:2], -1, config.head_dim)
    q, k, v = (ya.linear(x, w[f"self_attn.{name}_proj.weight"]).view(heads) for name in "qkv")
    q, k, v = _turn(q, rope).transpose(1, 2), _turn(k, rope).transpose(1, 2), v.transpose(1, 2)  # [B, H or K, S, D]
    S = T = q.shape[2]
    if cache is not None:
        cache.k[:, :, -S:], cache.v[:, :, -S:] = k, v
        k, v, T = cache.k, cache.v, cache.k.shape[2]
    # `is_causal` aligns the first query with the first key: right for a whole sequence only. One new position sees
    # everything; several after others need the mask.
    mask = None if S in (1, T) else torch.ones(S, T, dtype=torch.bool, device=x.device).tril(T - S)
    grouped = config.kv_heads < config.heads
    x = F.scaled_dot_product_attention(q, k, v, mask, is_causal=S == T, enable_gqa=grouped)
    return ya.linear(x.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])


def _mlp(w: Weights, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
    gate, up = ya.linear(x, w["mlp.gate_proj.weight"]), ya.linear(x, w["mlp.up_proj.weight"])
    return ya.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def _layer(
    config: Config, w: Weights, x: Float[Tensor, "B S E"], rope: Rope, cache: Cache | None = None
) -> Float[Tensor, "B S E"]:
    x = x + _attention(config, w, _norm(config, w["input_layernorm.weight"], x), rope, cache)
    return x + _mlp(w, _norm(config, w["post_attention_layernorm.weight"], x))


def block(config: Config) -> Callable[..., tuple[Tensor, None]]:
    """One layer as a body of `ya.scan`: `f(x, w) -> (x, None)`, or `f(x, w, rope)` with the rotary table in `consts`.

    Without a table each visit makes that of positions 0 .. S-1 (38 us of a CPU thread at S = 256, D = 64).
    """

    def f(x: Float[Tensor, "B S E"], w: Weights, rope: Rope | None = None) -> tuple[Float[Tensor, "B S E"], None]:
        if rope is None:
            rope = rotary(config, torch.arange(x.shape[1], device=x.device), x.dtype)
        return _layer(config, w, x, rope), None

    return f


def head(config: Config) -> Callable[[Any, Tensor], Tensor]:
    """`f(weights, x) -> logits`, [B, S, E] -> [B, S, V] in the dtype of `x`.

    `weights` is the head's unit, or `(head, embed)` when the config is tied; `head_unit` picks it from a tree.
    """

    def f(weights: Any, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S V"]:
        return ya.linear(*_last(config, weights, x))

    return f


def _last(config: Config, weights: Any, x: Float[Tensor, "B S E"]) -> tuple[Float[Tensor, "B S E"], Tensor]:
    """What the head multiplies."""
    own, matrix = (weights[0], weights[1]["weight"]) if config.tied else (weights, weights["lm_head.weight"])
    return _norm(config, own["model.norm.weight"], x), matrix


def head_unit(config: Config, params: Llama) -> Any:
    """What `ya.apply(head(config), ...)` visits: the head, with the embedding beside it when that is tied."""
    return (params.head, params.embed) if config.tied else params.head


def head_loss(config: Config) -> Callable[[Any, Tensor, Tensor], ya.Mean]:
    """`f(weights, x, targets) -> ya.Mean`: the summed cross entropy of the targets that are not -100, and their number.

    `weights` as for `head`. The sum is in fp32 at least. Large logits are never there as a whole: see
    `ya.linear_cross_entropy`.
    """

    def f(weights: Any, x: Float[Tensor, "B S E"], targets: Int[Tensor, "B S"]) -> ya.Mean:
        total = ya.linear_cross_entropy(*_last(config, weights, x), targets)
        return ya.Mean(total, (targets != -100).sum())

    return f


def _hidden(
    config: Config,
    params: Llama,
    tokens: Int[Tensor, "B S"],
    layer: Callable[..., tuple[Tensor, None]],
    unroll: int = 1,
) -> Float[Tensor, "B S E"]:
    x: Tensor = ya.apply(embed, params.embed, tokens)
    rope = rotary(config, torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
    x, _ = ya.scan(layer, x, params.layers, unroll=unroll, consts=rope)
    return x


def loss(
    config: Config, *, chunks: int = 1, unroll: int = 1, layer: Callable[..., tuple[Tensor, None]] | None = None
) -> Callable[[Llama, Mapping[str, Tensor]], ya.Mean]:
    """`loss_fn(params, batch)` for `ya.train_step` and `ya.eval_step`.

    `batch` has `tokens` and `targets`, both [B, S] integers. Targets are the next tokens, shifted by the caller; -100
    marks those that do not count. Many logits are never there as a whole: see `ya.linear_cross_entropy`.

    chunks: microbatches in layer-major order, gathering and reducing a layer once for all of them (`ya.chunk` around
        the block and around the head). B must be a multiple. Costs a second forward of every block and of the head, in
        the backward, and every layer's input for all B rows; no graph is kept but that of the chunk at hand. Pair it
        with `ya.remat.none`: a visit that recomputes as well runs its block a third time
    unroll: how many layers are gathered, visited and reduced as one (`ya.scan`): for layers so small that a message
        costs more than its bytes
    layer: in place of `block(config)`: the same through `torch.compile`, say

    Raises ValueError for chunks < 1 and, when called, for a B that is no multiple of `chunks`.
    """
    body = ya.chunk(layer or block(config), chunks, in_axes=(0, None, None))
    last = ya.chunk(head_loss(config), chunks, in_axes=(None, 0, 0))

    def loss_fn(params: Llama, batch: Mapping[str, Tensor]) -> ya.Mean:
        x = _hidden(config, params, batch["tokens"], body, unroll)
        mean: ya.Mean = ya.apply(last, head_unit(config, params), x, batch["targets"])
        return mean

    return loss_fn


def logits(config: Config, params: Llama, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
    """Scores of the next token at every position, in the dtype of the weights."""
    return _scores(config, params, _hidden(config, params, tokens, block(config)))


def _scores(config: Config, params: Llama, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S V"]:
    out: Tensor = ya.apply(head(config), head_unit(config, params), x)
    return out


def init_cache(
    config: Config,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Cache:
    """An empty cache for `length` positions, [L, B, K, length, D]; `dtype` is that of the weights it is used with."""
    shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
    return Cache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


def cached_block(config: Config) -> Callable[[Tensor, tuple[Weights, Cache], Rope], tuple[Tensor, None]]:
    """One layer that decodes: `f(x, (w, cache), rope) -> (x, None)`, for `ya.scan` under `torch.no_grad`.

    `cache` ends with the positions of `x`: its last S entries are overwritten, and `x` attends to all of it. `rope` is
    the table of those positions.
    """

    def f(x: Float[Tensor, "B S E"], xs: tuple[Weights, Cache], rope: Rope) -> tuple[Float[Tensor, "B S E"], None]:
        w, cache = xs
        return _layer(config, w, x, rope, cache), None

    return f


@torch.no_grad()
def decode(
    config: Config, params: Llama, tokens: Int[Tensor, "B S"], cache: Cache, position: int
) -> Float[Tensor, "B S V"]:
    """Scores after each of `tokens`, which stand at `position`, `position + 1`, ...; their keys and values go into
    `cache`, in place, so that the next call continues at `position + S`.

    A prompt is one call at position 0 (S > 1), each further token one call (S = 1). The window that a call sees grows
    with `position`: no work is spent on the empty rest of the cache, and a compiled block sees dynamic shapes.
    """
    _, batch, _, length, _ = cache.k.shape
    end = position + tokens.shape[1]
    if not 0 <= position < end <= length:
        raise ValueError(
            f"decode: tokens at positions {position} to {end - 1} do not fit a cache of {length} positions; "
            f"make a longer one with init_cache, or start again with the last tokens at position 0"
        )
    if tokens.shape[0] != batch:
        raise ValueError(f"decode: {tokens.shape[0]} sequences of tokens, but the cache was made for {batch}")
    x = ya.apply(embed, params.embed, tokens)
    if cache.k.dtype != x.dtype:
        raise TypeError(
            f"decode: the cache is {cache.k.dtype}, the weights are {x.dtype}; pass init_cache dtype={x.dtype}"
        )
    rope = rotary(config, torch.arange(position, end, device=tokens.device), x.dtype)
    window = Cache(cache.k[..., :end, :], cache.v[..., :end, :])
    x, _ = ya.scan(cached_block(config), x, (params.layers, window), consts=rope)
    return _scores(config, params, x)
