"""The directory of a model, read: its weights are in model.safetensors, or if there is none in the files that
model.safetensors.index.json lists.

Nothing leads out of a directory: neither names in an index nor symbolic links, except links from a snapshot in the
cache of Hugging Face's hub to the files in its `blobs`.
"""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Any

from yafsdp_fn.util import strict_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_JSON = 16 * 2**20
"""Limit in bytes of an index or of settings. An index takes some 90 bytes a tensor."""


def weight_files(root: Path) -> list[Path]:
    """Returns the files of the weights. Raises FileNotFoundError or ValueError that names what is missing or wrong."""
    if (single := member(root, SINGLE)) is not None:
        return [single]
    if member(root, INDEX) is None:
        raise FileNotFoundError(
            f"{root}: neither {SINGLE} nor {INDEX}; weights in other formats become safetensors by loading them "
            f"with transformers and calling save_pretrained"
        )
    weight_map = read_json(root / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{root / INDEX}: weight_map is {reprlib.repr(weight_map)}; expected the file of each tensor")
    for tensor, name in weight_map.items():
        if not _is_file_name(name):
            raise ValueError(
                f"{root / INDEX}: weight_map has {reprlib.repr(name)} for {reprlib.repr(tensor)}; expected the name of "
                f"a safetensors file in this directory"
            )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if member(root, name) is None]
    if missing:
        raise FileNotFoundError(
            f"{root / missing[0]}: no such file, though {INDEX} lists it ({len(missing)} of {len(names)} are missing); "
            f"copy the rest of the model"
        )
    return [root / name for name in names]


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises FileNotFoundError or ValueError that names the file."""
    if member(file.parent, file.name) is None:
        raise FileNotFoundError(
            f"{file}: no such file; expected a Hugging Face model directory with a {file.name}; "
            "a model of the hub is downloaded by `hf download`"
        )
    if (size := file.stat().st_size) > LONGEST_JSON:
        raise ValueError(f"{file}: it has {size} bytes; expected at most {LONGEST_JSON} of a {file.name}")
    try:
        value = strict_json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: damaged or cut short ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def member(root: Path, name: str) -> Path | None:
    """Returns the file `name` of the directory, or None. Raises ValueError for a link that leads out of it."""
    file = root / name
    if not file.is_file():
        return None
    if file.is_symlink():
        home = root.resolve()
        target = file.resolve()
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
            raise ValueError(f"{file}: a link to {target}, outside of the directory; copy the file itself")
    return file


def _is_file_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) >= 256:
        return False
    return re.fullmatch(r"[^/\\:]+\.safetensors", name) is not None
