"""A process without a process group, since emulating makes the default one: `in_child(function, *args)`.

A fork of the server that has imported all, with nothing of the tests' own process in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.harness import forked
from yafsdp_fn.nn import linear


@contextmanager
def child() -> Iterator[Callable[..., Any]]:
    """Runs a function of a test module in the process, and returns or raises what it does."""
    with ProcessPoolExecutor(1, mp_context=forked.context(), initializer=_begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=600)


@pytest.fixture(scope="package")
def in_child() -> Iterator[Callable[..., Any]]:
    """One for all tests of a folder."""
    with child() as run:
        yield run


def _begin() -> None:
    torch.set_num_threads(1)
    linear.LARGE = 0  # as in the tests' own process
