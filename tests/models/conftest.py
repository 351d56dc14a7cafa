from __future__ import annotations

import pytest
import torch

from tests.harness.child_process import in_child
from tests.models.theirs import OTHERS, SHAPES, Pair, draw, their_model

__all__ = ["in_child"]


@pytest.fixture(scope="session", params=[*SHAPES, *OTHERS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Each model of transformers, saved."""
    pytest.importorskip("transformers", reason="compares with transformers")
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    model = their_model(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory, max_shard_size="60KB")  # in several files, with an index of theirs
    return Pair(request.param, model, directory)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[1, 512]."""
    return draw(1, 512)
