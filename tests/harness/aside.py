"""A process without a process group, since emulating makes the default one: `aside(function, *args)`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from yafsdp_fn.engine import gradients


@pytest.fixture(scope="package")
def aside() -> Iterator[Callable[..., Any]]:
    """Runs a function of a test module in the process, and returns or raises what it does."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=600)


def _begin() -> None:
    torch.set_num_threads(1)
    gradients.LARGE = 0  # as in the tests' own process
