"""The model families, and the family of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from models import gpt2, llama, mistral, mixtral, qwen3
from models.files.format import Format
from models.parts.tree import Batch, Parts


class Family(Protocol):
    """The interface of a family's module. `Config` is its shape; functions are those of `models/parts/decoder.py`."""

    MODEL_TYPE: str
    """The value in `config.json`."""
    FORMAT: Format[Any]
    Config: type[Any]

    @property
    def CONFIGS(self) -> Mapping[str, Any]: ...
    @property
    def embed(self) -> Callable[..., Any]: ...
    @property
    def block(self) -> Callable[[Any], Callable[..., Any]]: ...
    @property
    def head_loss(self) -> Callable[[Any], Callable[..., Any]]: ...
    @property
    def params(self) -> Callable[..., Parts]: ...
    @property
    def loss(self) -> Callable[..., Callable[[Parts, Batch], Any]]: ...
    @property
    def logits(self) -> Callable[..., Any]: ...
    @property
    def score(self) -> Callable[..., Any]: ...
    @property
    def init_cache(self) -> Callable[..., Any]: ...
    @property
    def decode(self) -> Callable[..., Any]: ...


FAMILIES: tuple[Family, ...] = (llama, qwen3, mistral, gpt2, mixtral)

CONFIGS: dict[str, Any] = {name: config for family in FAMILIES for name, config in family.CONFIGS.items()}
"""Every named config, of every family."""


def of(config: object) -> Family:
    """Returns the family of a config. Raises TypeError for anything else."""
    for family in FAMILIES:
        if type(config) is family.Config:
            return family
    known = ", ".join(f"models.{family.MODEL_TYPE}.Config" for family in FAMILIES)
    raise TypeError(f"{type(config).__name__} is no config of a model: expected one of {known}")
