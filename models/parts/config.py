"""The common part of all decoders' configs, and the checks of fields."""

from __future__ import annotations

import abc
import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

LARGEST = 2**31 - 1
"""Limit of a config's integers: larger sizes are damage, and products of three stay far below a float's limit."""


class FieldError(ValueError):
    """A field has a value that no model can have. `field`: its name"""

    def __init__(self, config: object, field: str, why: str) -> None:
        super().__init__(f"{type(config).__name__}.{field}: {why}")
        self.field = field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(abc.ABC):
    """The shape of a decoder. Nothing here is derived: equal configs are equal models."""

    vocab: int
    """V, rows of the embedding and of the head."""
    embed: int
    """E, the width of the residual stream."""
    ffn: int
    """F, the width inside the feed-forward network."""
    layers: int
    """L, layers."""
    heads: int
    """H, query heads."""
    max_length: int
    """The longest sequence the model was made for. With rotary positions it is only a record, for `hf.save` and for
    callers: they have no end, so nothing here refuses a longer one."""
    tied: bool = False
    """The head's matrix is the embedding's, so there is no `lm_head.weight`."""
    norm_eps: float = 1e-5
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Settings for generation that `hf.load` found, and `hf.save` writes: `bos_token_id`, `eos_token_id` and the like
    of `config.json`, and under "generation_config" the content of that file."""

    def __post_init__(self) -> None:
        for field in ("vocab", "embed", "ffn", "layers", "heads", "max_length"):
            positive_int(self, field)
        boolean(self, "tied")
        positive(self, "norm_eps")

    @property
    @abc.abstractmethod
    def num_parameters(self) -> int:
        """The number of weights, embedding and head included; a tied matrix counts once."""

    @property
    @abc.abstractmethod
    def multiplied(self) -> int:
        """Weights that multiply each token, those of the head included; rows of embeddings are only looked up."""

    @property
    @abc.abstractmethod
    def attended(self) -> int:
        """H * D, the width of all queries."""

    @property
    def longest(self) -> int | None:
        """The number of positions. None: unlimited."""
        return None

    @property
    def head_parameters(self) -> int:
        """Weights of embedding and head without the last norm; a tied matrix counts once."""
        return self.vocab * self.embed * (1 if self.tied else 2)


def positive_int(config: object, field: str) -> None:
    value = getattr(config, field)
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise FieldError(config, field, f"expected a positive integer, got {reprlib.repr(value)}; {LARGEST} at most")


def boolean(config: object, field: str) -> None:
    if type(value := getattr(config, field)) is not bool:
        raise FieldError(config, field, f"expected True or False, got {reprlib.repr(value)}")


def positive(config: object, field: str) -> None:
    value = getattr(config, field)
    if not (finite(value) and value > 0.0):
        raise FieldError(config, field, f"expected a positive number, got {reprlib.repr(value)}")


def finite(value: Any) -> bool:
    # compared, not converted: an int may be too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
