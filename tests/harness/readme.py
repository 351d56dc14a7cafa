"""The README's code, for tests that look at what it leaves."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
(FIRST,) = re.findall(r"```python\n(.*?)```", README, re.S)


def on(mesh: str) -> str:
    """The first code, whose `train` is called here, on a mesh, and leaves its names beside the others."""
    code, _ = FIRST.replace("ya.mesh()", mesh).split("for ranks in ")
    return code.replace("    return metrics[", "    globals().update(locals())\n    return metrics[") + "train()\n"
