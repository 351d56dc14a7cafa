"""`yafsdp_fn.util.local_ranks` without its package, whose imports take seconds: a launcher starts ranks at once."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING

from train.machine import ROOT

if TYPE_CHECKING:
    from yafsdp_fn.util.local_ranks import dies_with, environment, wait
else:
    _spec = spec_from_file_location("local_ranks", ROOT / "yafsdp_fn" / "util" / "local_ranks.py")
    _spec.loader.exec_module(_module := module_from_spec(_spec))
    dies_with, environment, wait = _module.dies_with, _module.environment, _module.wait

__all__ = ["dies_with", "environment", "wait"]
