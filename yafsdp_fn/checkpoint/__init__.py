"""Checkpoints of sharded states: saved on R ranks, loaded on any other number, complete or absent."""

from typing import Any

from yafsdp_fn.checkpoint.folder import CheckpointError, latest, steps
from yafsdp_fn.checkpoint.io import load, load_params, save
from yafsdp_fn.checkpoint.named import load_moments, load_named, save_moments, save_named
from yafsdp_fn.checkpoint.saver import Saver

__all__ = [
    "CheckpointError",
    "Saver",
    "latest",
    "load",
    "load_moments",
    "load_named",
    "load_params",
    "save",
    "save_moments",
    "save_named",
    "steps",
]


def __getattr__(name: str) -> Any:
    from yafsdp_fn.util.foreign_names import hint

    raise AttributeError(f"module 'yafsdp_fn.checkpoint' has no attribute {name!r}{hint(f'checkpoint.{name}')}")


def __dir__() -> list[str]:
    return sorted(__all__)
