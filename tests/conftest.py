"""Fixtures for all tests. What takes time to import waits for the workers: the process that starts them needs none."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.harness import forked
from tests.harness.marks import left_out
from tests.harness.pool import Pool, Pools

# none of these may fail because the machine is slow
hypothesis.settings.register_profile("slow", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("slow")

if sys.platform == "linux":
    # No process of the tests preempts another by waking up, ranks included, which inherit this. Else a rank that sends
    # is often interrupted by the one that receives, and holds a lock for which gloo's thread asks in a loop meanwhile:
    # that is half of all CPU time.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

ROOM = 2 << 30
"""Bytes; a run leaves some 200 MB."""

NIGHT = 2400
"""Seconds after which a test hangs by night, when a search may take minutes; by day pyproject.toml has them."""

MANY_THREADS = 150
"""In one rank process; a mesh with its groups takes some 40."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--max-world", type=int, default=4, help="leave out tests that are parametrized with more ranks")
    parser.addoption("--nightly", action="store_true", help="run tests marked nightly too")


def pytest_configure(config: pytest.Config) -> None:
    """By day temporary folders lie in memory, where there is enough: files that have to reach a disk are waited for."""
    where = Path("/dev/shm")
    if config.getoption("--nightly") or not os.access(where, os.W_OK):
        return
    about = os.statvfs(where)
    if about.f_bavail * about.f_frsize > ROOM and not about.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(where))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--max-world")
    nightly = config.getoption("--nightly")
    kept = [item for item in items if _world(item) <= most and (nightly or not item.get_closest_marker("nightly"))]
    if nightly:
        Pool.patience = NIGHT - 100
        for item in kept:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(NIGHT))
    else:
        waiting = left_out(kept)
        kept = [item for item in kept if item not in waiting]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_collectstart() -> None:
    from yafsdp_fn.nn import linear

    linear.LARGE = 0  # the small weights of tests go the way of large ones, into slots; see Pool for ranks


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported is no garbage: tests that look for some look at nothing but their own, and soon. What the first
    steps import is half a million objects more, of which each collection would cost a third of a second."""
    for name in forked.IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _world(item: pytest.Item) -> int:
    world: int = item.callspec.params.get("world", 1) if hasattr(item, "callspec") else 1
    return world


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Rank processes by world size; started at first use, ended with the session."""
    made = {world: Pool(world) for world in (1, 2, 3, 4, 8)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(autouse=True, scope="module")
def few_threads(pools: Pools) -> Iterator[None]:
    """Groups of meshes that tests have made stay, and gloo's idle threads poll: processes with many begin afresh."""
    yield
    for pool in pools.values():
        if pool.threads() > MANY_THREADS:
            pool.stop()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
