"""`manifest.json`: everything of a checkpoint that is no tensor. It comes from other people: types are checked."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from yafsdp_fn import disk
from yafsdp_fn.checkpoint.content import Description
from yafsdp_fn.checkpoint.folder import CheckpointError, folder_name

MANIFEST = "manifest.json"
FORMAT = 2
LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Manifest:
    """step, seed: of the state; ranks: that wrote it; circumstances: of a deterministic mesh; tensors: by key;
    program: its JSON; extra: the user's"""

    step: int
    seed: int
    ranks: int
    circumstances: dict[str, str]
    tensors: dict[str, Description]
    program: str | None
    extra: dict[str, Any]


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=1)


def write(folder: Path, manifest: Manifest) -> None:
    disk.write(folder / MANIFEST, to_json(manifest).encode())


def read(folder: Path) -> Manifest:
    """That of a checkpoint's folder. Raises CheckpointError, naming the file and the field."""
    path = folder / MANIFEST
    try:
        manifest = from_json(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    if folder.name.partition(".")[0] != folder_name(manifest.step):
        raise CheckpointError(f"{path} is of step {manifest.step}: expected the folder {folder_name(manifest.step)}")
    return manifest


def from_json(text: str, path: str) -> Manifest:
    """What `to_json` wrote; `path` is how errors call it."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    if (version := values.pop("format", None)) != FORMAT:
        raise CheckpointError(f"{path}: format {version!r:.40}, this version of yafsdp_fn reads format {FORMAT}")
    fields = [field.name for field in dataclasses.fields(Manifest)]
    if sorted(values) != sorted(fields):
        raise CheckpointError(f"{path}: expected the fields {', '.join(fields)}, got {', '.join(values)[:200]}")
    for name in ("step", "seed", "ranks"):
        number = values[name]
        if type(number) is not int or not (-LARGEST if name == "seed" else 0) <= number < LARGEST:
            raise CheckpointError(f"{path}: {name} is {str(number)[:40]}, expected an integer of 64 bits")
    if values["program"] is not None and not isinstance(values["program"], str):
        raise CheckpointError(f"{path}: program is {type(values['program']).__name__}, expected text or null")
    for name in ("extra", "circumstances"):
        if not isinstance(values[name], dict):
            raise CheckpointError(f"{path}: {name} is {type(values[name]).__name__}, expected an object")
    tensors = values["tensors"]
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: tensors is {type(tensors).__name__}, expected an object")
    for key, described in tensors.items():
        leaves = described.get("leaves", {}) if isinstance(described, dict) else None
        if not isinstance(leaves, dict) or not all(isinstance(shape, list) for shape in leaves.values()):
            raise CheckpointError(f"{path}: tensors: {key[:200]}: expected its dtype and the shapes of its leaves")
    return Manifest(**values)
