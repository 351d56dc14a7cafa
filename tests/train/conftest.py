from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pool import Pools
from tests.train.inside import Runs, text
from train import tokenizer
from train.config import Sources


@pytest.fixture
def runs(pools: Pools, tmp_path: Path) -> Runs:
    text(tmp_path, 200)
    return Runs(pools, tmp_path)


@pytest.fixture(scope="session")
def talk_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that was learnt on a line of talk."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "a.txt").write_text("One? Yes, one. Two? No. Be short.\n" * 9)
    text = Sources(files=(f"{folder}/a.txt",), heldout_fraction=0)
    tokenizer.learn(tokenizer.Config(folder / "bpe", 512, text))
    return folder / "bpe"
