"""The scripts of docs/recipes as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"


def recipe(name: str) -> Any:
    """As Python would import it for a script of that folder."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
