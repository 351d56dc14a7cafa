"""Public names that are imported at their first use: a package's `__init__.pyi` lists them, for type checkers too."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def homes_of(file: str) -> dict[str, str]:
    """Returns name -> module of the names that the stub beside `file`, an `__init__.py`, imports."""
    found: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.name: node.module for alias in node.names}
    return found


def imported(package: str, homes: dict[str, str], name: str) -> Any:
    """Imports a name of `homes` for a package, which keeps it. Raises AttributeError where it has no such name."""
    space = sys.modules[package]
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=space)
    of_package = homes[name] == package
    found = import_module(f"{package}.{name}") if of_package else getattr(import_module(homes[name]), name)
    setattr(space, name, found)
    return found
