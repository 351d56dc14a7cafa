"""Loads and saves Hugging Face directories of any family, chosen by `model_type`: see `models/files/tree.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from models.families import FAMILIES, of
from models.files import adapters, tree
from models.files.config_json import shown
from models.files.settings import CONFIG, settings
from models.parts.axes import NONE, Axes
from models.parts.tree import Parts


def load(directory: str | os.PathLike[str], *, pin_norms: bool = False, axes: Axes = NONE) -> tuple[Any, Parts]:
    """Returns `(config, params)` of a model directory, as `tree.load`. Raises ValueError for a model of no family."""
    root = Path(directory)
    name = settings(root)[CONFIG].get("model_type")
    for family in FAMILIES:
        if name == family.MODEL_TYPE:
            return tree.load(family.FORMAT, root, pin_norms=pin_norms, axes=axes)
    known = ", ".join(family.MODEL_TYPE for family in FAMILIES)
    raise ValueError(
        f"{root / CONFIG}: model_type is {shown(name)}; there are {known}. ya.functionalize takes any nn.Module"
    )


def save(
    directory: str | os.PathLike[str],
    config: Any,
    params: Parts,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model directory, as `tree.save`, for the family of `config`."""
    tree.save(of(config).FORMAT, directory, config, params, dtype=dtype, max_shard_bytes=max_shard_bytes)


def save_adapters(directory: str | os.PathLike[str], config: Any, params: Parts, *, base: str = "") -> None:
    """Writes the adapters of `ya.lora` as an adapter of peft: see `models/files/adapters.py`."""
    adapters.save(of(config).FORMAT, directory, params, base=base)
