"""Sections that do not end well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run(setting: Any, report: Callable[[dict[str, Any]], None]) -> None:
    report({"part": 1, "device": setting.device})
    raise RuntimeError("no such luck")
