"""What a run is made of: frozen dataclasses, from the command line (tyro) and from `config.json` (resume, sample)."""

from train.config.data import Data, Rows, Sources
from train.config.error import ConfigError, counts, require
from train.config.optim import Optim
from train.config.saved import C, differences, flat, from_json, to_json
from train.config.settings import Config, Settings
from train.config.sharding import Sharding

__all__ = [
    "C",
    "Config",
    "ConfigError",
    "Data",
    "Optim",
    "Rows",
    "Settings",
    "Sharding",
    "Sources",
    "counts",
    "differences",
    "flat",
    "from_json",
    "require",
    "to_json",
]
