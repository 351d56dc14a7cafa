"""Sublayers common to Llama, Qwen3, Mistral and Mixtral: decoders with RMSNorm, rotary positions and SwiGLU, without
biases, with Hugging Face's names.

Axes: L layers, B batch, S sequence, E embed, H query heads, K key/value heads, D head dim, F feed-forward, V
vocabulary. Weights are [out, in]. Activations have the dtype of the weights; only angles, norms and the loss are
computed in fp32 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts.attention import Cache, Positions, attend
from models.parts.axes import NONE, Axes, rows_of
from models.parts.config import Shape
from models.parts.decoder import Decoder
from models.parts.rotary import RotaryShape, rotary, turn
from models.parts.tree import Parts, Weights
from yafsdp_fn.params.initializers import Initializer, normal, ones


def residual(config: Shape) -> Initializer:
    """Returns the initializer of matrices that write to the residual stream: 0.02 / sqrt(2 L), so that its variance
    does not grow with depth."""
    return normal(0.02 / math.sqrt(2 * config.layers))


def gain(config: Shape, pin_norms: bool) -> Any:
    """Returns the norm gains of all layers, which start at one."""
    param = ya.Param((config.layers, config.embed), init=ones)
    return ya.Pinned(param) if pin_norms else param


def attention_params(config: RotaryShape, axes: Axes = NONE) -> dict[str, Any]:
    E = config.embed
    L = config.layers
    Q = config.heads * config.head_dim
    KV = config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": ya.Param((L, Q, E), split=axes.split(-2)),
        "self_attn.k_proj.weight": ya.Param((L, KV, E), split=axes.split(-2)),
        "self_attn.v_proj.weight": ya.Param((L, KV, E), split=axes.split(-2)),
        "self_attn.o_proj.weight": ya.Param((L, E, Q), init=residual(config), split=axes.split(-1)),
    }


def norm_params(config: Shape, pin_norms: bool) -> dict[str, Any]:
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return {name: gain(config, pin_norms) for name in names}


def mlp_params(config: Shape, axes: Axes = NONE) -> dict[str, Any]:
    E = config.embed
    F_ = config.ffn
    L = config.layers
    return {
        "mlp.gate_proj.weight": ya.Param((L, F_, E), split=axes.split(-2)),
        "mlp.up_proj.weight": ya.Param((L, F_, E), split=axes.split(-2)),
        "mlp.down_proj.weight": ya.Param((L, E, F_), init=residual(config), split=axes.split(-1)),
    }


def whole(config: Shape, layer: dict[str, Any], axes: Axes = NONE) -> Parts:
    """The parameters of a decoder with these leaves in its layers. With a tied head there is no `lm_head.weight`."""
    V = config.vocab
    E = config.embed
    head = {"model.norm.weight": ya.Param((E,), init=ones)}
    if not config.tied:
        head["lm_head.weight"] = ya.Param((V, E), split=axes.split(-2))
    return Parts(embed={"weight": ya.Param((V, E), split=axes.split(-2))}, layers=ya.Stacked(layer), head=head)


def dense(config: RotaryShape, pin_norms: bool, axes: Axes, more: dict[str, Any] | None = None) -> Parts:
    """Returns the parameters of a decoder with the leaves of `layer`. more: a family's own leaves"""
    axes.must_split("tensor")
    norms = norm_params(config, pin_norms)
    layer = {**attention_params(config, axes), **norms, **(more or {}), **mlp_params(config, axes)}
    return whole(config, layer, axes)


def embed(
    w: Weights, tokens: Int[Tensor, "B S"], positions: Tensor | None = None, axes: Axes = NONE
) -> Float[Tensor, "B S E"]:
    """Returns the tokens' rows of the embedding, not scaled; positions are handled by the layers."""
    return rows_of(w["weight"], tokens, axes)


def norm(config: Shape, w: Tensor, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """Computes RMSNorm over the last axis, in fp32 inside, and times a gain of a dtype of its own in that."""
    # in bf16 Hugging Face rounds once more, before the weight
    wide = torch.promote_types(x.dtype, w.dtype)
    return F.rms_norm(x.to(wide), (x.shape[-1],), w.to(wide), config.norm_eps).to(x.dtype)


def attention(
    config: RotaryShape, w: Weights, x: Float[Tensor, "B S E"], at: Positions, cache: Cache | None, axes: Axes = NONE
) -> Float[Tensor, "B S E"]:
    """Computes self-attention. Queries and keys are normalised before rotation if the layer has gains for that.

    Over `tensor` a rank has its own heads, and its result is a part of the sum."""
    axes.must_have("attention", w["self_attn.o_proj.weight"].shape[-1], config.attended)
    flat = (ya.linear(x, w[f"self_attn.{name}_proj.weight"]) for name in "qkv")
    q, k, v = (torch.unflatten(part, -1, (-1, config.head_dim)) for part in flat)
    if "self_attn.q_norm.weight" in w:
        q = norm(config, w["self_attn.q_norm.weight"], q)
        k = norm(config, w["self_attn.k_norm.weight"], k)
    x = attend(turn(q, at), turn(k, at), v, at, cache)
    return ya.linear(x, w["self_attn.o_proj.weight"])


def mlp(w: Weights, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
    gate = ya.linear(x, w["mlp.gate_proj.weight"])
    up = ya.linear(x, w["mlp.up_proj.weight"])
    return ya.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def layer(
    config: RotaryShape, w: Weights, x: Float[Tensor, "B s E"], at: Positions, cache: Cache | None, axes: Axes = NONE
) -> tuple[Float[Tensor, "B s E"], None]:
    """Runs attention and feed-forward network, with a norm before each."""
    y = axes.every(norm(config, w["input_layernorm.weight"], x))
    x = x + axes.added(attention(config, w, y, at, cache, axes))
    y = axes.every(norm(config, w["post_attention_layernorm.weight"], x))
    return x + axes.added(mlp(w, y)), None


def last(
    config: Shape, weights: Any, x: Float[Tensor, "B s E"], axes: Axes = NONE
) -> tuple[Float[Tensor, "B S E"], Tensor]:
    """Returns the factors of the head: the normalised stream, and its matrix, of `tensor` this rank's rows."""
    own, matrix = (weights[0], weights[1]["weight"]) if config.tied else (weights, weights["lm_head.weight"])
    return axes.every(norm(config, own["model.norm.weight"], x)), matrix


def decoder(
    layer: Callable[..., tuple[Tensor, Any]] = layer,
    window: Callable[[Any], int | None] = lambda config: None,
    extra: Callable[..., Any] | None = None,
    splits: tuple[str, ...] = ("tensor",),
) -> Decoder[Any]:
    """Makes a family of these sublayers and its own parts: see `Decoder`."""
    return Decoder(
        embed=embed,
        table=rotary,
        layer=layer,
        last=last,
        kv=lambda config: (config.kv_heads, config.head_dim),
        window=window,
        extra=extra,
        splits=splits,
    )
