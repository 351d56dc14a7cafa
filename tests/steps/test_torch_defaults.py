"""Nothing follows torch's default device and default dtype: not a buffer, nor a number on its way.

On the meta device, in place of a GPU, whatever follows the default has no values, and its first use fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import histories
from tests.harness.oracle import batch_of
from tests.harness.pool import on_ranks
from tests.harness.problems import base_loss, base_params
from tests.steps.test_carried import SETTINGS, assert_same, live


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def on_cpu(*args: Any, **kwargs: Any) -> Any:
    with torch.device("cpu"):
        return batch_of(*args, **kwargs)


@on_ranks(2)
def test_whatever_happens_to_a_state_gives_the_same_bits(mesh: Any, tmp_path: Path) -> None:
    history = list(histories.ACTIONS)
    with mock.patch.object(histories, "batch_of", on_cpu):
        expected = live(SETTINGS[0], True, False, history, tmp_path / "expected")
        with other_defaults():
            found = live(SETTINGS[0], True, False, history, tmp_path / "found")
    assert_same(found, expected, "under other defaults")


def numbers(mesh: Any, folder: Path) -> list[Any]:
    """What a state gives whose matrices are updated by their owners, and whose carries wait on the host."""
    tx = ya.optim.muon(0.02, others=ya.optim.in_format(ya.optim.adamw(1e-2), ya.formats.Roots()))
    state = ya.init(base_params(3), tx, mesh=mesh)
    step = ya.train_step(base_loss, tx, schedule=ya.schedules.zero3(remat=ya.schedules.remat.offload()))
    state, metrics = step(state, on_cpu(mesh.get_rank()))
    with ya.checkpoint.Saver(folder) as saver:
        saver.save(state)
    direction = ya.normal_like(0, state.params)
    value = ya.vdot(direction, state.params)
    again, _ = ya.checkpoint.load(folder, state)
    return [*map(float, optree.tree_leaves((metrics, value))), ya.checksum(state), ya.checksum(again)]


@on_ranks(1, 2)
def test_owners_hosts_and_savers_give_the_same_numbers(mesh: Any, tmp_path: Path) -> None:
    expected = numbers(mesh, tmp_path / "expected")
    with other_defaults():
        assert numbers(mesh, tmp_path / "found") == expected


def test_layers_are_stacked_where_they_are() -> None:
    with torch.device("meta"):
        made: Tensor = ya.scan(lambda x, w: (x, w), torch.ones(2, device="cpu"), torch.ones(3, 2, device="cpu"))[1]
    assert made.device.type == "cpu"
