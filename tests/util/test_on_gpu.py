"""None of our kernels is chosen for fake tensors: those of a GPU say that they are there, and their address is 0.

Whole traces, on the fake device: `tests/cuda/test_traces.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.nn import cross_entropy
from yafsdp_fn.util import on_gpu


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_kernel_is_for_fake_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "HAS_TRITON", True)
    with FakeTensorMode():
        like = torch.ones(8, 4, device=device)
        targets = torch.ones(8, dtype=torch.int64, device=device)
        assert like.is_cuda is (device == "cuda")
        assert not on_gpu.kernels_run_on(like)
        assert on_gpu.vector_kernels(like) is None
        assert cross_entropy._softmax_of(like, targets, -100) is cross_entropy._softmax_
