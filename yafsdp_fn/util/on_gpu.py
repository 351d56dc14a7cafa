"""The kernels of Triton where they can run. They are imported at the first use on a GPU: that takes half a second."""

import importlib.util
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_on_gpu(tensor: Tensor) -> bool:
    """Returns whether `tensor` is on a GPU, and no fake one of a trace, which says so, too."""
    return tensor.is_cuda and not is_fake(tensor)


def kernels_run_on(tensor: Tensor) -> bool:
    """Returns whether our kernels may be launched on `tensor`. Nothing else decides that.

    The address of a fake tensor is 0: a kernel that was launched there would end all use of the GPU in this process.
    """
    return HAS_TRITON and is_on_gpu(tensor)


def vector_kernels(tensor: Tensor) -> Any:
    """Returns the module `vector_kernels`, or None where its kernels cannot run on `tensor`."""
    if not kernels_run_on(tensor):
        return None
    from yafsdp_fn.util import vector_kernels

    return vector_kernels
