"""Llama 2, 3, 3.1 and 3.2: `config` (shapes), `model` (functions of parameter trees), `hf` (Hugging Face files)."""

from models.llama import hf
from models.llama.config import CONFIGS, Config, RopeScaling
from models.llama.model import (
    Cache,
    Llama,
    Rope,
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
    params,
    rotary,
)

__all__ = [
    "CONFIGS",
    "Cache",
    "Config",
    "Llama",
    "Rope",
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
    "params",
    "rotary",
]
