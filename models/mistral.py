"""Mistral: Llama with a sliding window of positions.

Functions: see `models/parts/decoder.py`; files: `models.hf`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from models.files.config_json import Json
from models.files.format import Format
from models.parts import decoding, layers
from models.parts.axes import NONE, Axes
from models.parts.config import positive_int
from models.parts.rotary import RotaryShape
from models.parts.tree import Parts

MODEL_TYPE = "mistral"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RotaryShape):
    """The shape of a Mistral."""

    window: int | None = None
    """Positions that a query sees, itself included. None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            positive_int(self, "window")


CONFIGS: dict[str, Config] = {
    "debug-mistral": Config(
        vocab=256, embed=256, ffn=384, layers=8, heads=4, kv_heads=2, head_dim=64, max_length=256, window=64
    ),
    "mistral-7b": Config(  # v0.1; later versions have no window
        vocab=32_000,
        embed=4096,
        ffn=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        max_length=32_768,
        window=4096,
    ),
}


def params(config: Config, *, pin_norms: bool = False, axes: Axes = NONE) -> Parts:
    """The parameters, described once, as those of `models.llama`. pin_norms: all norms of the layers (`ya.Pinned`);
    axes: with `tensor`, matrices, embedding and head are split over it"""
    return layers.dense(config, pin_norms, axes)


DECODER = layers.decoder(window=lambda config: config.window)
embed = DECODER.embed
block = DECODER.block
head_loss = DECODER.head_loss
over, loss, logits, score = DECODER.over, DECODER.loss, DECODER.logits, DECODER.score
init_cache = partial(decoding.init_cache, DECODER)
decode = partial(decoding.decode, DECODER)

JSON = Json(
    model_type=MODEL_TYPE,
    architecture="MistralForCausalLM",
    expected={"hidden_act": "silu"},
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    further={"window": ("sliding_window", 4096)},
)


FORMAT = Format[Config]("Mistral", params, partial(JSON.read, Config), JSON.write)
