"""Triton kernels on tensors of the CPU, run by Triton's interpreter in a process of its own:

    call = kernel("yafsdp_fn.util.vector_kernels", "scale_")
    call(values, scale)                                         # writes the tensors, returns what the function returns

The interpreter is chosen by TRITON_INTERPRET=1 when functions are decorated, those of Triton's own library too, and
then nothing can be compiled. So it has a process, and none of it shows in the one of the tests.

Made for Triton 3.6 and 3.7. One of its operations rounds as no GPU does, and is replaced there: float32 to bfloat16,
where it rounds halves away from zero and may lose the carry of a mantissa of ones. And 3.6 makes an index of an array
of one element, which numpy 2.4 refuses: it does as 3.7 does.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor

LOOK_NS, EPOCH_NS = 100, 10**18
"""The stand-in for the GPU's global timer: how much later it is at each look, and the time before the first one."""


def kernel(module: str, function: str) -> Callable[..., Any]:
    """A function of a module of kernels, run there. What it writes to its tensors is copied to those given here."""

    def call(*args: Any, **options: Any) -> Any:
        # bytes: a tensor itself would move to shared memory, and with a view goes all that it is a view of
        packed = pickle.dumps(([arg.clone() if isinstance(arg, Tensor) else arg for arg in args], options))
        result, written = pickle.loads(_process().submit(_call, module, function, packed).result(timeout=250))
        for arg, after in zip(args, written, strict=True):
            if isinstance(arg, Tensor):
                arg.copy_(after)
        return result

    return call


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Ends with the tests' own."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        pool.submit(int).result(timeout=250)  # starts the process
    return pool


def _call(module: str, function: str, packed: bytes) -> bytes:
    args, options = pickle.loads(packed)
    result = getattr(importlib.import_module(module), function)(*args, **options)
    return pickle.dumps((result, args))


def _begin() -> None:
    torch.set_num_threads(1)
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from benchmarks.emulated import kernels as timed

    convert = interpreter._convert_float
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    def to_bf16(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if (source, to) != (tl.float32, tl.bfloat16):
            return convert(data, source, to, rounding)
        rounded = torch.from_numpy(np.array(data)).bfloat16()
        return rounded.view(torch.uint16).numpy()

    interpreter._convert_float = to_bf16
    interpreter._patch_lang_tensor = patched
    # inline assembly has no interpreter
    looks = iter(range(EPOCH_NS + LOOK_NS, sys.maxsize, LOOK_NS))
    timed.globaltimer = lambda: next(looks)
