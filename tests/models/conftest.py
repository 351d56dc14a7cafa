from __future__ import annotations

import pytest
import torch

from tests.harness.child_process import in_child
from tests.models.theirs import OTHERS, SHAPES, Pair, draw, their_model

__all__ = ["in_child"]


@pytest.fixture(scope="session", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request.param, tmp_path_factory)


@pytest.fixture(scope="session", params=list(OTHERS))
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Of every family but Llama."""
    return _pair(request.param, tmp_path_factory)


def _pair(name: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pytest.importorskip("transformers", reason="compares with transformers")
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    model = their_model(name)
    directory = tmp_path_factory.mktemp(name)
    model.save_pretrained(directory, max_shard_size="60KB")  # in several files, with an index of theirs
    return Pair(name, model, directory)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[1, 512]."""
    return draw(1, 512)
