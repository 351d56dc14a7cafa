"""Qwen3 (dense): Llama with a norm of each head's queries and keys before rotation, and any head width.

Functions: see `models/parts/decoder.py`; files: `models.hf`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import yafsdp_fn as ya
from models.files.config_json import Json
from models.files.format import Format
from models.parts import decoding, layers
from models.parts.axes import NONE, Axes
from models.parts.rotary import RotaryShape
from models.parts.tree import Parts
from yafsdp_fn.params.initializers import ones

MODEL_TYPE = "qwen3"


class Config(RotaryShape):
    """The shape of a Qwen3."""

    @property
    def layer_parameters(self) -> int:
        return super().layer_parameters + 2 * self.head_dim


_published = partial(
    Config, vocab=151_936, kv_heads=8, head_dim=128, max_length=40_960, norm_eps=1e-6, rope_theta=1_000_000.0
)
CONFIGS: dict[str, Config] = {
    "debug-qwen3": Config(
        vocab=256, embed=192, ffn=320, layers=8, heads=4, kv_heads=2, head_dim=64, max_length=256, tied=True
    ),
    "qwen3-0.6b": _published(embed=1024, ffn=3072, layers=28, heads=16, tied=True),
    "qwen3-1.7b": _published(embed=2048, ffn=6144, layers=28, heads=16, tied=True),
    "qwen3-4b": _published(embed=2560, ffn=9728, layers=36, heads=32, tied=True),
    "qwen3-8b": _published(embed=4096, ffn=12_288, layers=36, heads=32),
}


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE) -> Parts:
    """The parameters, described once, as those of `models.llama`. pin_norms: all norms of the layers (`ya.Pinned`);
    axes: with `tensor`, matrices, embedding and head are split over it"""
    gain: Any = ya.Param((config.layers, config.head_dim), init=ones)
    gain = ya.Pinned(gain) if pin_norms else gain
    return layers.dense(config, pin_norms, axes, {"self_attn.q_norm.weight": gain, "self_attn.k_norm.weight": gain})


DECODER = layers.decoder()
embed = DECODER.embed
block = DECODER.block
head_loss = DECODER.head_loss
over, loss, logits, score = DECODER.over, DECODER.loss, DECODER.logits, DECODER.score
init_cache = partial(decoding.init_cache, DECODER)
decode = partial(decoding.decode, DECODER)

JSON = Json(
    model_type=MODEL_TYPE,
    architecture="Qwen3ForCausalLM",
    expected={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
)
FORMAT = Format[Config]("Qwen3", params, partial(JSON.read, Config), JSON.write)
