"""What docs/checkpoints.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.harness.pool import Pools

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def runs(mesh: Any, code: str) -> None:
    exec(compile(code, "checkpoints.md", "exec"), {})


def test_the_page_runs(pools: Pools) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 4
    pools[1].run(runs, "\n".join(blocks))
