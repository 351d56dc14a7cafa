"""What a run is made of: frozen dataclasses, from the command line (tyro) and from `config.json` (resume, sample)."""

from train.config.data import Chats, Data, Rows, Sources, Tables
from train.config.error import ConfigError, counts, require
from train.config.mesh import Mesh
from train.config.optim import Optim
from train.config.saved import C, differences, flat, from_json, to_json
from train.config.settings import Config, Lora, Settings, Tuning
from train.config.sharding import SAVED, Sharding, is_own

__all__ = [
    "SAVED",
    "C",
    "Chats",
    "Config",
    "ConfigError",
    "Data",
    "Lora",
    "Mesh",
    "Optim",
    "Rows",
    "Settings",
    "Sharding",
    "Sources",
    "Tables",
    "Tuning",
    "counts",
    "differences",
    "flat",
    "from_json",
    "is_own",
    "require",
    "to_json",
]
