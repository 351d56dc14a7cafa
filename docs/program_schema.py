"""Makes docs/program-1.schema.json out of the annotations of ops and traces: `python docs/program_schema.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from yafsdp_fn.program.json import NAMES, VERSION
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.util.schema import kinds

FILE = Path(__file__).with_name(f"program-{VERSION}.schema.json")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `to_json` writes, from the annotations that it is read by. Whether its
    numbers name what is there, and its ops are right, no schema says."""
    found: dict[str, Any] = {}
    trace = _schema(Trace, found)
    ops = [_schema(op, found, name) for name, op in NAMES.items()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A program of yafsdp_fn, version {VERSION}",
        "type": "object",
        "properties": {
            "version": {"const": VERSION},
            "trace": trace,
            "stages": {"type": "array", "minItems": 1, "items": {"type": "array", "items": {"anyOf": ops}}},
        },
        "required": ["trace", "stages"],
        "additionalProperties": False,
        "$defs": dict(sorted(found.items())),
    }


def _schema(kind: Any, found: dict[str, Any], op: str = "") -> dict[str, Any]:
    """The schema of a `kind`; those of records go to `found`. op: the name that begins the list of an op's fields"""
    if hasattr(kind, "_fields"):
        if kind.__name__ not in found:
            found[kind.__name__] = {}  # its place
            fields = {name: _schema(inner, found) for name, inner in kinds(kind).items()}
            needed = [name for name in kind._fields if name not in kind._field_defaults]
            first = [{"const": op}] * bool(op)
            least = len(needed) + len(first)
            row = {"type": "array", "prefixItems": [*first, *fields.values()], "items": False, "minItems": least}
            whole = {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}
            described = {"description": " ".join((kind.__doc__ or "").split("\n\n")[0].split())}
            found[kind.__name__] = described | (row if op else {"anyOf": [row, whole]})
        return {"$ref": f"#/$defs/{kind.__name__}"}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and inner[-1] is Ellipsis:
        return {"type": "array", "items": _schema(inner[0], found)}
    if origin is tuple:
        items = [_schema(each, found) for each in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is UnionType:
        return {"anyOf": [_schema(each, found) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if kind is int:
        return {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    return {"type": {str: "string", bool: "boolean", NoneType: "null"}[kind]}


if __name__ == "__main__":
    FILE.write_text(json.dumps(schema(), indent=1) + "\n")
