from __future__ import annotations

import pytest
import torch

from tests.harness.aside import aside
from tests.models.theirs import SHAPES, Pair, their_model

__all__ = ["aside"]


@pytest.fixture(scope="session", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pytest.importorskip("transformers", reason="compares with transformers")
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    model = their_model(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return Pair(request.param, model, directory)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[1, 512]."""
    return torch.randint(0, 97, (1, 512), generator=torch.Generator().manual_seed(1))
