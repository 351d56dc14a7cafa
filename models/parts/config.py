"""What every decoder's config has, and how a field is refused."""

from __future__ import annotations

import abc
import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

LARGEST = 2**31 - 1
"""Of a config's integers: a size beyond it is damage, and products of three stay far from where floats end."""


class FieldError(ValueError):
    """A field that no model can have. `field`: its name."""

    def __init__(self, config: object, field: str, why: str) -> None:
        super().__init__(f"{type(config).__name__}.{field}: {why}")
        self.field = field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(abc.ABC):
    """Of a decoder. Nothing here is derived: equal configs are equal models."""

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
    max_length: int
    """The longest sequence the model was made for. Where positions are rotary it is a record, for `hf.save` and for
    callers: these have no end, so nothing here refuses a longer one."""
    tied: bool = False
    """Whether the head's matrix is the embedding's, so that there is no `lm_head.weight`."""
    norm_eps: float = 1e-5
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """What `hf.load` found for those who generate, and `hf.save` writes: `bos_token_id`, `eos_token_id` and the like of
    `config.json`, and under "generation_config" what that file holds."""

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
        """Weights that one token meets, those of the head included: rows of embeddings are looked up."""

    @property
    @abc.abstractmethod
    def attended(self) -> int:
        """H * D, the width of all queries."""

    @property
    def longest(self) -> int | None:
        """How many positions there are. None: they have no end."""
        return None

    @property
    def head_parameters(self) -> int:
        """Of embedding and head without the last norm; a tied matrix counts once."""
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
