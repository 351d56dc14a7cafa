"""Reads JSON from untrusted sources: it is unambiguous, or a ValueError says why not.

    loads('{"a": 1, "a": 2}')      # ValueError: the key 'a' is there twice
    loads("[NaN]")                 # ValueError: NaN is no number of JSON
    loads("[" * 100_000)           # ValueError: it is nested too deep

Python's own reader takes the last of two values, takes NaN, and raises RecursionError.
"""

import json
import reprlib
from typing import Any, NoReturn


def loads(text: str) -> Any:
    """Returns the value of `text`. Raises ValueError if it is cut short, ambiguous or not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {reprlib.repr(key)} is there twice")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
