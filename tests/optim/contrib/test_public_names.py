"""optim/contrib needs public names alone, and whoever asks at the old place is told the new one."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from yafsdp_fn import optim

FILES = sorted(path for path in Path(optim.contrib.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("file", FILES, ids=[path.stem for path in FILES])
def test_it_imports_public_names_alone(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= {*sys.stdlib_module_names, "optree", "torch"}
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("yafsdp_fn"):
            assert {name.name for name in node.names} <= set(import_module(str(node.module)).__all__), node.module


def test_the_old_place_names_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'soap'; it is ya\.optim\.contrib\.soap$"):
        _ = optim.soap
    with pytest.raises(AttributeError, match=r"no attribute 'shampoo'$"):
        _ = optim.shampoo
