"""Refusing settings by name."""

from __future__ import annotations

from typing import Any

MANY = 2**31 - 1
"""The largest count that a setting takes."""
LONGEST = 10.0**7
"""Seconds, some four months: what clocks and libraries take as a timeout."""


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, and what to do. Shown without a traceback."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def counts(settings: Any, prefix: str = "", **least: int) -> None:
    """Refuses fields of `settings` that are not counts: `least` (by name) to `MANY`."""
    for name, low in least.items():
        value = getattr(settings, name)
        require(low <= value <= MANY, f"{prefix}{name} is {value}: expected {low} to {MANY}")
