"""Optional parts make steps faster, and nothing else needs them: without their folder it trains to the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pages import ROOT

TRAIN = """
import yafsdp_fn as ya
from tests.harness.small import batch, loss, model, one_rank

print(ya.__file__)
tx = ya.optim.adamw(1e-2)
state, step = ya.init(model(), tx, mesh=one_rank()), ya.train_step(loss, tx, schedule=ya.schedules.zero3())
for number in range(4):
    state, metrics = step(state, batch(number))
    print(float(metrics["loss"]).hex())
"""


def losses(root: Path) -> list[str]:
    """Of some steps by the library under `root`."""
    where = os.pathsep.join([str(root), str(ROOT)])
    found = subprocess.run(
        [sys.executable, "-P", "-c", TRAIN],
        env=os.environ | {"PYTHONPATH": where},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    library, *values = found.stdout.split()
    assert Path(library).is_relative_to(root)
    return values


@pytest.mark.nightly
def test_the_library_without_extras_trains_to_the_same_bits(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "yafsdp_fn", tmp_path / "yafsdp_fn", ignore=shutil.ignore_patterns("extras", "__pycache__"))
    assert not (tmp_path / "yafsdp_fn" / "extras").exists()
    assert losses(tmp_path) == losses(ROOT)
