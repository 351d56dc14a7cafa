"""Ranks that issue collectives of unequal sizes: a timeout that says where they are, and no end of the process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.harness.groups import SOON, breakable, outcome
from tests.harness.pool import Pool
from yafsdp_fn.communication.communicators import communicators

KINDS = {"gather": "all-gather", "reduction": "reduce-scatter", "sum": "all-reduce (sum)"}


def unequal(mesh: Any) -> tuple[dict[str, str], int]:
    found = {}
    for which in KINDS:
        mesh = breakable()
        comms = communicators(mesh)
        n = 64 * (1 + comms.rank)
        work: dict[str, Callable[[], Any]] = {
            "gather": partial(comms.all_gather, torch.ones(n)),
            "reduction": partial(comms.reduce_scatter, torch.ones(2 * n)),
            "sum": partial(comms.all_reduce_sum, torch.ones(1 + comms.rank)),
        }
        found[which] = outcome(work[which], SOON)
    return found, os.getpid()


def test_unequal_sizes(pools: dict[int, Pool]) -> None:
    before = [pool.pid for pool in pools[2]._processes]
    for rank, (found, pid) in enumerate(pools[2].run(unequal)):
        for which, text in found.items():
            assert f"CommunicationError: rank {rank}: {KINDS[which]} failed" in text, text
            where = text.partition("Where ranks are:\n")[2]
            assert re.search(rf"  ranks? \S+: .*waiting for {re.escape(KINDS[which])}; ", where), text
        assert not before or pid == before[rank]
