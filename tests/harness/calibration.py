"""Calibrations for tests in which it does not matter how large the figures are: of little work, and not for long."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

from yafsdp_fn.lab.calibrate import SIZES

LITTLE = SIZES["cpu"]._replace(rows=8, moved=64, width=64, sequence=8, copied=1 << 16, large=1 << 20)


def brief() -> contextlib.AbstractContextManager[object]:
    return patch.multiple("yafsdp_fn.lab.calibrate", SIZES={"cpu": LITTLE}, WINDOW=1e-3)
