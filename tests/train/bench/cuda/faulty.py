"""Sections that do not end well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def run(setting: Any, report: Callable[[dict[str, Any]], None], how: str) -> None:
    report({"part": 1, "device": setting.device})
    if how == "raises":
        raise RuntimeError("no such luck")
    time.sleep(1000)
