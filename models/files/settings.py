"""The settings of a model directory, config.json and generation_config.json, at every moment of a save.

A save puts its weights beside those of the earlier model, and changes from one to the other by renaming or removing one
file (`tensor_writer.py`), so a kill leaves one or the other. Settings are other files. If a save changes them, it
removes config.json before its weights come, and puts the new one in place at last: a kill between these renames leaves
weights without a config.json, which nobody takes for a model, and never those of one model with settings of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yafsdp_fn.util import disk
from yafsdp_fn.util.model_folder import member, read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_config.json"
"""The settings of peft's adapters: see `must_be_apart`."""
PARTIAL = "partial-{}"
"""The name of a file that is not in place yet: no reader looks for it."""

Settings = dict[str, dict[str, Any]]
"""The content of each file of settings, by its name; a missing file is absent."""


def settings(root: Path) -> Settings:
    """Reads the settings of a model."""
    must_be_apart(root, ADAPTER)
    there = [name for name in (CONFIG, GENERATION) if name == CONFIG or member(root, name) is not None]
    return {name: read_json(root / name) for name in there}


def must_be_apart(root: Path, other: str) -> None:
    """Raises ValueError if `other` is there: a model and an adapter in one directory are one model to transformers."""
    if (root / other).is_file():
        raise ValueError(
            f"{root}: {other} is there. To transformers a directory with an adapter of peft is the adapter and its "
            "base model together: give each a directory of its own, or merge them (peft's merge_and_unload, then "
            "save_pretrained)"
        )


def differs(root: Path, name: str, values: Settings) -> bool:
    """Returns whether the file `name` differs from what `values` would make it."""
    there = (root / name).read_bytes() if (root / name).is_file() else None
    return there != (dumped(values[name]) if name in values else None)


def write_aside(root: Path, name: str, values: Mapping[str, Any]) -> Path:
    """Writes a JSON file aside, to be renamed to `name`."""
    return disk.write(root / PARTIAL.format(name), dumped(values))


def dumped(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()
