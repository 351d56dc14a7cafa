from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pool import Pools
from tests.train.inside import Runs, text


@pytest.fixture
def runs(pools: Pools, tmp_path: Path) -> Runs:
    text(tmp_path, 200)
    return Runs(pools, tmp_path)
