"""The kernels of Triton where they can run. It is imported at the first use on a GPU: that takes half a second."""

import importlib.util
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def vector_kernels(device: torch.device) -> Any:
    """Returns the module `vector_kernels`, or None where its kernels cannot run."""
    if device.type != "cuda" or not HAS_TRITON:
        return None
    from yafsdp_fn.util import vector_kernels

    return vector_kernels
