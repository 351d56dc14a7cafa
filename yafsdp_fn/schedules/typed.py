"""Lists of JSON as the NamedTuples that they were, by the annotations of their fields.

    typed(Gather, [[0], [2], "shard"])     # Gather(units=(0,), slots=(2,), source="shard")
    typed(Gather, [[0], ["2"]])            # ValueError: .slots[0]: expected an int, got '2'

Kinds: int, str, bool, X | None, Literal, tuple[X, ...], tuple[X, Y], and NamedTuples of these. A NamedTuple is a list
of its fields in order, or an object; those with a default may be missing.
"""

import functools
import reprlib
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

WORDS = {int: "an int of 64 bits", str: "a string", bool: "true or false", NoneType: "null"}


def typed(kind: Any, value: Any) -> Any:
    """`value` as a `kind`. Raises ValueError that begins with the way to what is wrong, `.visits[2].units[0]` say."""
    if (fields := getattr(kind, "_fields", None)) is not None:
        return _record(kind, fields, value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _tuple(inner, value)
    if origin is UnionType:  # of null and one other
        return None if value is None else typed(inner[inner[0] is NoneType], value)
    if origin is Literal:
        if not (isinstance(value, str) and value in inner):
            raise _expected(" or ".join(map(repr, inner)), value)
    elif type(value) is not kind or (kind is int and not -(2**63) <= value < 2**63):
        raise _expected(WORDS[kind], value)
    elif kind is str and any("\ud800" <= char <= "\udfff" for char in value):  # names are shown, and it cannot be
        raise _expected("a string without half a surrogate pair", value)
    return value


def _record(kind: Any, fields: tuple[str, ...], value: Any) -> Any:
    if isinstance(value, list) and len(value) <= len(fields):
        value = dict(zip(fields, value, strict=False))
    if not isinstance(value, dict):
        raise _expected(f"a list of at most {len(fields)}, {', '.join(fields)}", value)
    for field in value.keys() - set(fields):
        raise ValueError(f": there is no {reprlib.repr(field)}; expected {', '.join(fields)}")
    for field in fields:
        if field not in value and field not in kind._field_defaults:
            raise ValueError(f": no {field}")
    return kind(**{field: _at(f".{field}", _hints(kind)[field], item) for field, item in value.items()})


def _tuple(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _expected("a list", value)
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(value)
    elif len(inner) != len(value):
        raise _expected(f"a list of {len(inner)}", value)
    return tuple([_at(f"[{at}]", kind, item) for at, (kind, item) in enumerate(zip(inner, value, strict=True))])


def _at(place: str, kind: Any, value: Any) -> Any:
    try:
        return typed(kind, value)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _expected(what: str, value: Any) -> ValueError:
    return ValueError(f": expected {what}, got {reprlib.repr(value)}")
