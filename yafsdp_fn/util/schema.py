"""Reads values of JSON or TOML as what annotations say; other people wrote them.

class Search(NamedTuple):
    seed: int
    moves: Annotated[int, Limits(0, 10**6)] = 0

typed(Search, {"seed": 1, "moves": -1})     # ValueError: .moves: expected 0 to 1,000,000, got -1
typed(Search, [1])                          # Search(seed=1, moves=0)
"""

import functools
import reprlib
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

WORDS = {
    int: "an int of 64 bits",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    NoneType: "null",
    dict: "an object",
}
LARGEST = 1e300
"""Numbers are at most so large: sums of them are finite."""


class Limits(NamedTuple):
    """The limits of a number, in an annotation: `Annotated[int, Limits(1, 8)]`, `Limits(1)` without a highest."""

    low: float
    high: float = float("inf")


def typed(kind: Any, value: Any) -> Any:
    """Converts `value` to a `kind`: int, float, str, bool, X | None, Literal, tuple[X, ...], tuple[X, Y], dict (whose
    content is not looked at), any of these with its limits, or a NamedTuple of these, which is a list of its fields in
    order, or an object; those with a default may be missing.

    Raises ValueError that begins with the way to what is wrong, `.visits[2].units[0]` say."""
    if hasattr(kind, "_fields"):
        return _record(kind, value)
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return _limited(typed(inner[0], value), inner[1:])
    if origin is tuple:
        return _tuple(inner, value)
    if origin is dict:
        return typed(dict, value)
    if origin in (UnionType, Union):  # of null and one other
        return None if value is None else typed(inner[inner[0] is NoneType], value)
    if origin is Literal:
        if not (isinstance(value, str) and value in inner):
            raise _expected(" or ".join(map(repr, inner)), value)
    elif kind is float:
        if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
            raise _expected(WORDS[float], value)
        return float(value)
    elif type(value) is not kind or (kind is int and not -(2**63) <= value < 2**63):
        raise _expected(WORDS[kind], value)
    elif kind is str and any("\ud800" <= char <= "\udfff" for char in value):  # names are shown, and it cannot be
        raise _expected("a string without half a surrogate pair", value)
    return value


def _limited(found: Any, notes: tuple[Any, ...]) -> Any:
    for limits in notes:
        if isinstance(limits, Limits) and not limits.low <= found <= limits.high:
            raise _expected(f"{limits.low:,} to {limits.high:,}", found)
    return found


def _record(kind: Any, value: Any) -> Any:
    fields = kind._fields
    if isinstance(value, list) and len(value) <= len(fields):
        value = dict(zip(fields, value, strict=False))
    if not isinstance(value, dict):
        raise _expected(f"a list of at most {len(fields)}, {', '.join(fields)}", value)
    for field in value.keys() - set(fields):
        raise ValueError(f": there is no {reprlib.repr(field)}; expected {', '.join(fields)}")
    for field in fields:
        if field not in value and field not in kind._field_defaults:
            raise ValueError(f": no {field}")
    of = kinds(kind, limits=True)
    return kind(**{field: typed_at(f".{field}", of[field], item) for field, item in value.items()})


def _tuple(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _expected("a list", value)
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(value)
    elif len(inner) != len(value):
        raise _expected(f"a list of {len(inner)}", value)
    return tuple([typed_at(f"[{at}]", kind, item) for at, (kind, item) in enumerate(zip(inner, value, strict=True))])


def typed_at(where: str, kind: Any, value: Any) -> Any:
    """Converts as `typed` does. where: what an error begins with"""
    try:
        return typed(kind, value)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _expected(what: str, value: Any) -> ValueError:
    return ValueError(f": expected {what}, got {shown(value)}")


def shown(value: Any) -> str:
    """Returns the beginning of a value in Python's words, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write integers of more than some thousand digits
        return "an integer of thousands of digits"


@functools.cache
def kinds(record: Any, limits: bool = False) -> dict[str, Any]:
    """Returns the annotations of a NamedTuple by field. limits: include the limits in `Annotated`"""
    return get_type_hints(record, include_extras=limits)
