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

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import yafsdp_fn as ya
from models.parts.attention import Cache, Positions, attend
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


def attention_params(config: RotaryShape) -> dict[str, Any]:
    E, L = config.embed, config.layers
    Q, KV = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": ya.Param((L, Q, E)),
        "self_attn.k_proj.weight": ya.Param((L, KV, E)),
        "self_attn.v_proj.weight": ya.Param((L, KV, E)),
        "self_attn.o_proj.weight": ya.Param((L, E, Q), init=residual(config)),
    }


def norm_params(config: Shape, pin_norms: bool) -> dict[str, Any]:
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return {name: gain(config, pin_norms) for name in names}


def mlp_params(config: Shape) -> dict[str, Any]:
    E, F_, L = config.embed, config.ffn, config.layers
    return {
        "mlp.gate_proj.weight": ya.Param((L, F_, E)),
        "mlp.up_proj.weight": ya.Param((L, F_, E)),
        "mlp.down_proj.weight": ya.Param((L, E, F_), init=residual(config)),
    }


def whole(config: Shape, layer: dict[str, Any]) -> Parts:
    """The parameters of a decoder with these leaves in its layers. With a tied head there is no `lm_head.weight`."""
    V, E = config.vocab, config.embed
    head = {"model.norm.weight": ya.Param((E,), init=ones)}
    if not config.tied:
        head["lm_head.weight"] = ya.Param((V, E))
    return Parts(embed={"weight": ya.Param((V, E))}, layers=ya.Stacked(layer), head=head)


def dense(config: RotaryShape, pin_norms: bool, more: dict[str, Any] | None = None) -> Parts:
    """Returns the parameters of a decoder with the leaves of `layer`. more: a family's own leaves"""
    norms = norm_params(config, pin_norms)
    return whole(config, {**attention_params(config), **norms, **(more or {}), **mlp_params(config)})


def embed(w: Weights, tokens: Int[Tensor, "B S"], positions: Tensor | None = None) -> Float[Tensor, "B S E"]:
    """Returns the tokens' rows of the embedding, not scaled; positions are handled by the layers."""
    return ya.embedding(tokens, w["weight"])


def norm(config: Shape, w: Tensor, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """Computes RMSNorm over the last axis, in fp32 inside."""
    # in bf16 Hugging Face rounds once more, before the weight
    return F.rms_norm(x, (x.shape[-1],), w, config.norm_eps)


def attention(
    config: RotaryShape, w: Weights, x: Float[Tensor, "B S E"], at: Positions, cache: Cache | None
) -> Float[Tensor, "B S E"]:
    """Computes self-attention. Queries and keys are normalised before rotation if the layer has gains for that."""
    heads = (*x.shape[:2], -1, config.head_dim)
    q, k, v = (ya.linear(x, w[f"self_attn.{name}_proj.weight"]).view(heads) for name in "qkv")
    if "self_attn.q_norm.weight" in w:
        q, k = norm(config, w["self_attn.q_norm.weight"], q), norm(config, w["self_attn.k_norm.weight"], k)
    x = attend(turn(q, at), turn(k, at), v, at.mask, cache)
    return ya.linear(x, w["self_attn.o_proj.weight"])


def mlp(w: Weights, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
    gate, up = ya.linear(x, w["mlp.gate_proj.weight"]), ya.linear(x, w["mlp.up_proj.weight"])
    return ya.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def layer(
    config: RotaryShape, w: Weights, x: Float[Tensor, "B S E"], at: Positions, cache: Cache | None
) -> tuple[Float[Tensor, "B S E"], None]:
    """Runs attention and feed-forward network, with a norm before each."""
    x = x + attention(config, w, norm(config, w["input_layernorm.weight"], x), at, cache)
    return x + mlp(w, norm(config, w["post_attention_layernorm.weight"], x)), None


def last(config: Shape, weights: Any, x: Float[Tensor, "B S E"]) -> tuple[Float[Tensor, "B S E"], Tensor]:
    """Returns the factors of the head: the normalised stream, and its matrix."""
    own, matrix = (weights[0], weights[1]["weight"]) if config.tied else (weights, weights["lm_head.weight"])
    return norm(config, own["model.norm.weight"], x), matrix


def decoder(
    layer: Callable[..., tuple[Tensor, Any]] = layer,
    window: Callable[[Any], int | None] = lambda config: None,
    extra: Callable[..., Any] | None = None,
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
    )
