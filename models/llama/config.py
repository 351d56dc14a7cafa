"""What distinguishes one Llama from another, and the published ones as a table.

config = CONFIGS["llama3.2-1b"]
config.num_parameters                                  # 1_235_814_400
dataclasses.replace(config, layers=4, vocab=32_000)    # one of your own; never mutated
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

LARGEST = 2**31 - 1
"""Of a config's integers: a size beyond it is damage, and products of three stay far from where floats end."""


class FieldError(ValueError):
    """A field that no model can have. `field`: its name."""

    def __init__(self, config: object, field: str, why: str) -> None:
        super().__init__(f"{type(config).__name__}.{field}: {why}")
        self.field = field


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies, `rope_type: llama3` in Hugging Face's words.

    A frequency that turns more than `high_freq_factor` times within `original_max_length` positions stays; one that
    turns less than `low_freq_factor` times is divided by `factor`; those between are blended linearly.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        if not (_finite(self.factor) and self.factor >= 1.0):
            raise FieldError(self, "factor", f"expected a number of at least 1, got {reprlib.repr(self.factor)}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (_finite(low) and _finite(high) and 0.0 < low < high):
            why = f"expected 0 < low_freq_factor < high_freq_factor, got {reprlib.repr(low)} and {reprlib.repr(high)}"
            raise FieldError(self, "low_freq_factor", why)
        _positive_int(self, "original_max_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a Llama. Nothing here is derived: equal configs are equal models."""

    vocab: int
    """V, rows of the embedding and of the head."""
    embed: int
    """E, the width of the residual stream."""
    ffn: int
    """F, the width inside the feed-forward network."""
    layers: int
    """L."""
    heads: int
    """H, query heads."""
    kv_heads: int
    """K, key and value heads; each serves H / K query heads."""
    head_dim: int
    """D, even. H * D need not be E."""
    max_length: int
    """The longest sequence the model was made for. A record, for `hf.save` and for callers: rotary positions have no
    end, so nothing here refuses a longer one."""
    tied: bool = False
    """Whether the head's matrix is the embedding's, so that there is no `lm_head.weight`."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """What `hf.load` found for those who generate, and `hf.save` writes: `bos_token_id`, `eos_token_id` and the like of
    `config.json`, and under "generation_config" what that file holds."""

    def __post_init__(self) -> None:
        for field in ("vocab", "embed", "ffn", "layers", "heads", "kv_heads", "head_dim", "max_length"):
            _positive_int(self, field)
        if self.heads % self.kv_heads:
            why = f"{self.kv_heads} does not divide heads={self.heads}; every key/value head serves the same number of"
            raise FieldError(self, "kv_heads", f"{why} query heads")
        if self.head_dim % 2:
            raise FieldError(self, "head_dim", f"expected an even number, got {self.head_dim}; rotary halves it")
        if type(self.tied) is not bool:
            raise FieldError(self, "tied", f"expected True or False, got {reprlib.repr(self.tied)}")
        for field in ("norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not (_finite(value) and value > 0.0):
                raise FieldError(self, field, f"expected a positive number, got {reprlib.repr(value)}")

    @property
    def num_parameters(self) -> int:
        """The number of weights, embedding and head included; a tied matrix counts once."""
        attention = 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.embed * self.ffn + 2 * self.embed
        return self.layers * layer + self.vocab * self.embed * (1 if self.tied else 2) + self.embed


def _positive_int(config: object, field: str) -> None:
    value = getattr(config, field)
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise FieldError(config, field, f"expected a positive integer, got {reprlib.repr(value)}; {LARGEST} at most")


def _finite(value: Any) -> bool:
    # compared, not converted: an int may be too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


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
