"""The config of a Llama, and the published ones as a table.

config = CONFIGS["llama3.2-1b"] config.num_parameters                                  # 1_235_814_400
dataclasses.replace(config, layers=4, vocab=32_000)    # one of your own; never mutated
"""

from __future__ import annotations

from functools import partial

from models.parts.config import LARGEST, FieldError
from models.parts.rotary import RopeScaling, RotaryShape

__all__ = ["CONFIGS", "LARGEST", "Config", "FieldError", "RopeScaling"]


class Config(RotaryShape):
    """The shape of a Llama. Nothing here is derived: equal configs are equal models."""


_llama2 = partial(Config, vocab=32_000, head_dim=128, max_length=4096)
_llama3 = partial(Config, vocab=128_256, max_length=8192, rope_theta=500_000.0)
_llama3_1 = partial(_llama3, max_length=131_072, rope_scaling=RopeScaling(factor=8.0))
_llama3_2 = partial(_llama3, max_length=131_072, rope_scaling=RopeScaling(factor=32.0), tied=True)

# `llama2-34b` was never released under that name: it is CodeLlama 34B (rotary base 1e6, 16k positions), the "34B" of
# YaFSDP's published benchmark. `debug` reads bytes and trains on a laptop: 4.07M weights, deep and narrow, so that it
# exercises a schedule as the large ones do.
CONFIGS: dict[str, Config] = {
    "debug": Config(vocab=256, embed=256, ffn=384, layers=8, heads=4, kv_heads=2, head_dim=64, max_length=256),
    "llama2-7b": _llama2(embed=4096, ffn=11_008, layers=32, heads=32, kv_heads=32),
    "llama2-13b": _llama2(embed=5120, ffn=13_824, layers=40, heads=40, kv_heads=40),
    "llama2-34b": _llama2(
        embed=8192, ffn=22_016, layers=48, heads=64, kv_heads=8, max_length=16_384, rope_theta=1_000_000.0
    ),
    "llama2-70b": _llama2(embed=8192, ffn=28_672, layers=80, heads=64, kv_heads=8),
    "llama3-8b": _llama3(embed=4096, ffn=14_336, layers=32, heads=32, kv_heads=8, head_dim=128),
    "llama3-70b": _llama3(embed=8192, ffn=28_672, layers=80, heads=64, kv_heads=8, head_dim=128),
    "llama3.1-8b": _llama3_1(embed=4096, ffn=14_336, layers=32, heads=32, kv_heads=8, head_dim=128),
    "llama3.1-70b": _llama3_1(embed=8192, ffn=28_672, layers=80, heads=64, kv_heads=8, head_dim=128),
    "llama3.1-405b": _llama3_1(embed=16_384, ffn=53_248, layers=126, heads=128, kv_heads=8, head_dim=128),
    "llama3.2-1b": _llama3_2(embed=2048, ffn=8192, layers=16, heads=32, kv_heads=8, head_dim=64),
    "llama3.2-3b": _llama3_2(embed=3072, ffn=8192, layers=28, heads=24, kv_heads=8, head_dim=128),
}
