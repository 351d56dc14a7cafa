"""Tests that need a GPU: `make gpu-check` runs those marked gpu, of files that import this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
ON_GPU = [pytest.mark.gpu, NO_CUDA]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
"""Of a parametrization, or of all tests of a file."""


def on_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test of a real GPU."""
    return pytest.mark.gpu(NO_CUDA(test))
