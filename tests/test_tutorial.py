"""docs/tutorial.md runs from top to bottom, as one script, and prints what it shows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.harness import forked
from tests.harness.pages import doc

PAGE = doc("tutorial")
MARK = "-- the end of a block --"
NUMBER = re.compile(r"\d+\.\d+")
BLOCK_AND_OUTPUT = re.compile(r"^```python\n(.*?)^```\n\n((?: {4}[^\n]*\n)*)", re.S | re.M)


@pytest.mark.timeout(400)
def test_its_blocks_print_what_is_shown(tmp_path: Path) -> None:
    """But for the last digits of losses and times, which are of this machine's kernels."""
    blocks = BLOCK_AND_OUTPUT.findall(PAGE)
    assert len(blocks) == PAGE.count("```python\n") > 10
    script = tmp_path / "tutorial.py"
    script.write_text("".join(f"{code}\nprint({MARK!r}, flush=True)\n" for code, _ in blocks))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    status, said = forked.script(script, env=env, cwd=tmp_path)
    assert status == 0, said
    printed = said.split(f"{MARK}\n")[:-1]
    assert len(printed) == len(blocks)
    for (code, shown), said in zip(blocks, printed, strict=True):
        lines = [line.strip() for line in shown.splitlines()]
        if not lines:
            continue
        found = said.strip().splitlines()
        assert [NUMBER.sub("#", line) for line in found] == [NUMBER.sub("#", line) for line in lines], code
        for number, expected in zip(NUMBER.findall(said), NUMBER.findall(shown), strict=True):
            assert abs(float(number) - float(expected)) <= 0.02 + 0.02 * float(expected), f"{code}\n{said}"
