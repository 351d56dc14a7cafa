"""Value and gradients of sharded losses equal those of the plain loop over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.groups import by_the_backend
from tests.harness.marks import nightly
from tests.harness.oracle import by_autograd, check_exact
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS, SCHEDULES

FEW = ("zero3", "zero3-remat-every", "zero2-remat-all")
KINDS = [name for name in PROBLEMS if name not in ("base", "dropout")]


@pytest.mark.sampled
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(mesh: Any, layers: int, schedule: str) -> None:
    microbatches = (1, 3) if mesh.size() < 3 else (3,)
    check_exact(mesh, PROBLEMS["base"], layers=layers, schedules=(schedule,), microbatches=microbatches)


@pytest.mark.sampled
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("schedule", FEW)
def test_every_kind_of_visit(mesh: Any, name: str, schedule: str) -> None:
    """Tied, frozen and grouped units, several stacks, reverse, consts, outputs, unrolled and unused visits."""
    layers = 7 if name == "unrolled" else 3
    microbatches = (1, 3) if mesh.size() == 1 else (3,)
    check_exact(mesh, PROBLEMS[name], layers=layers, schedules=(schedule,), microbatches=microbatches)


@on_ranks(2)
def test_weights_that_are_not_large(mesh: Any) -> None:
    """As small weights are by default; in the other tests all go the way of large ones."""
    with by_autograd():
        for name in KINDS[::3]:
            check_exact(mesh, PROBLEMS[name], layers=3, schedules=FEW, microbatches=(3,))


@on_ranks(1, nightly(2))
def test_float32(mesh: Any) -> None:
    """The other tests are in float64, where rounding hides nothing."""
    for name in ("base", *(KINDS if mesh.size() == 1 else KINDS[1::3])):
        check_exact(mesh, PROBLEMS[name], layers=3, schedules=FEW[:1], microbatches=(3,), dtype=torch.float32)


@on_ranks(2)
def test_collectives_of_the_backend(mesh: Any) -> None:
    """What ranks of NCCL do."""
    with by_the_backend():
        for name in ("base", "tied"):
            check_exact(mesh, PROBLEMS[name], layers=3, schedules=FEW)
