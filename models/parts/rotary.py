"""Rotary positions by halves, as in Hugging Face (Meta's own files rotate adjacent pairs), with Llama 3.1's scaling:
the config of decoders that have them, the table, and the rotation."""

from __future__ import annotations

import dataclasses
import math
import reprlib

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from models.parts.attention import Positions
from models.parts.config import FieldError, Shape, finite, positive, positive_int


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
        if not (finite(self.factor) and self.factor >= 1.0):
            raise FieldError(self, "factor", f"expected a number of at least 1, got {reprlib.repr(self.factor)}")
        low = self.low_freq_factor
        high = self.high_freq_factor
        if not (finite(low) and finite(high) and 0.0 < low < high):
            why = f"expected 0 < low_freq_factor < high_freq_factor, got {reprlib.repr(low)} and {reprlib.repr(high)}"
            raise FieldError(self, "low_freq_factor", why)
        positive_int(self, "original_max_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryShape(Shape):
    """The shape of a decoder with rotary positions and grouped heads."""

    kv_heads: int
    """K, key and value heads; each serves H / K query heads."""
    head_dim: int
    """D, even. H * D need not be E."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("kv_heads", "head_dim"):
            positive_int(self, field)
        if self.heads % self.kv_heads:
            why = f"{self.kv_heads} does not divide heads={self.heads}; every key/value head serves the same number of"
            raise FieldError(self, "kv_heads", f"{why} query heads")
        if self.head_dim % 2:
            raise FieldError(self, "head_dim", f"expected an even number, got {self.head_dim}; rotary halves it")
        positive(self, "rope_theta")

    @property
    def attended(self) -> int:
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, a gated feed-forward network and two norms."""
        return (
            2 * self.embed * self.head_dim * (self.heads + self.kv_heads) + 3 * self.embed * self.ffn + 2 * self.embed
        )

    @property
    def num_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.head_parameters + self.embed

    @property
    def multiplied(self) -> int:
        return self.num_parameters - (0 if self.tied else self.vocab * self.embed)


def rotary(config: RotaryShape, positions: Int[Tensor, "*B S"], dtype: torch.dtype) -> Positions:
    """Returns the table for `positions`, made once per forward and read by every layer (`consts` of the scan).

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
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    signed = torch.stack([-sin, sin])
    return Positions(repeat(cos, "... D -> ... (half D)", half=2), rearrange(signed, "half ... D -> ... (half D)"))


def turn(x: Float[Tensor, "B S H D"], at: Positions) -> Float[Tensor, "B S H D"]:
    """Rotates queries or keys by their positions."""
    # (a, b) -> (a cos - b sin, b cos + a sin); with the sign inside the table the swap of halves is one copy, and
    # forward and backward take 0.75 of the time of chunk, negate and concatenate, with the same bits.
    assert at.cos is not None
    assert at.sin is not None
    return x * at.cos + x.roll(x.shape[-1] // 2, -1) * at.sin
