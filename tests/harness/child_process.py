"""A process without a process group, since emulating makes the default one.

    in_child(function, *args)                  # a fixture: what the function returns there, or raises

    @in_child_process                          # a test whose whole body runs there
    def test_of_a_device(name, tmp_path): ...  # the arguments are pytest's

A fork of the server that has imported all, with nothing of the tests' own process in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.harness import forked
from yafsdp_fn.nn import linear

InChild = Callable[..., Any]
"""The fixture `in_child`."""


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


def in_child_process(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in the process of `in_child`."""

    @functools.wraps(test)
    def run(in_child: InChild, **arguments: Any) -> None:
        in_child(_run, run, arguments)

    own = inspect.signature(test).parameters.values()
    asked = inspect.Parameter("in_child", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([asked, *own])  # type: ignore[attr-defined]
    return run


def _run(test: Any, arguments: dict[str, Any]) -> None:
    test.__wrapped__(**arguments)


def _begin() -> None:
    torch.set_num_threads(1)
    linear.LARGE = 0  # as in the tests' own process
