"""The repository's pages, and the Python in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def doc(name: str) -> str:
    """The text of docs/NAME.md."""
    return (DOCS / f"{name}.md").read_text()


def blocks(text: str) -> list[str]:
    """The Python that a page shows."""
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
