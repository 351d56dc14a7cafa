"""Rows of actions that torch.distributed.pipelining wrote, run: gradients and three steps against the plain loop."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from tests.harness.pool import Pool
from tests.steps.staged import test_exact_stages
from yafsdp_fn import schedules as s

FAMILIES = {  # segments per stage, shape, microbatches per stage
    "GPipe": (1, "loop", 2),
    "LoopedBFS": (2, "loop", 2),
    "Interleaved1F1B": (2, "loop", 2),
    "InterleavedZeroBubble": (2, "loop", 1),
    "ZBVZeroBubble": (2, "v", 2),
    "DualPipeV": (2, "v", 2),
}
ALL = os.environ.get("STAGES") == "all"


def check(mesh: Any, family: str, stages: int) -> None:
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    per_stage, shape, each = FAMILIES[family]
    several = per_stage if per_stage > 1 else None
    for model, comms in (("skip", False), ("tied", True)):  # comms: torch's own messages, gathers and reductions

        def order(sharding: s.Schedule, comms: bool = comms) -> Any:
            rows = get_schedule_ops(family, stages, each * stages, several, with_comms=comms and several is not None)
            return s.from_actions(rows, sharding)

        test_exact_stages.HOW["imported"] = test_exact_stages.How(order, s.zero3(remat="first:1"), per_stage, shape)
        test_exact_stages.check(mesh, model, "imported", stages, (each * stages,), True)


EVERY = [(world, stages, family) for world, stages in [(2, 2), (4, 2), (3, 3), (4, 4)] for family in FAMILIES]


@pytest.mark.parametrize(("world", "stages", "family"), EVERY if ALL else [(2, 2, "ZBVZeroBubble")])
def test_imported(pools: dict[int, Pool], world: int, stages: int, family: str) -> None:
    pools[world].run(check, family, stages)
