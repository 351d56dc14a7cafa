"""Llama 2, 3, 3.1 and 3.2: `config` (shapes), `model` (functions of parameter trees), `hf` (Hugging Face files)."""

from models.llama import hf
from models.llama.config import CONFIGS, Config, RopeScaling
from models.llama.hf import FORMAT
from models.llama.model import (
    Axes,
    Cache,
    Llama,
    Positions,
    block,
    cached_block,
    decode,
    embed,
    head,
    head_loss,
    head_unit,
    init_cache,
    logits,
    loss,
    over,
    params,
    rotary,
    score,
)

MODEL_TYPE = "llama"

__all__ = [
    "CONFIGS",
    "FORMAT",
    "MODEL_TYPE",
    "Axes",
    "Cache",
    "Config",
    "Llama",
    "Positions",
    "RopeScaling",
    "block",
    "cached_block",
    "decode",
    "embed",
    "head",
    "head_loss",
    "head_unit",
    "hf",
    "init_cache",
    "logits",
    "loss",
    "over",
    "params",
    "rotary",
    "score",
]
