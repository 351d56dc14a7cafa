"""Checkpoints of sharded states: `save` on R ranks, `load` on any other number, complete or absent."""

from yafsdp_fn.checkpoint.folder import CheckpointError, latest
from yafsdp_fn.checkpoint.io import load, load_params, save

__all__ = ["CheckpointError", "latest", "load", "load_params", "save"]
