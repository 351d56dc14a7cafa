"""What meets everybody with a GPU first: the README's code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import yafsdp_fn as ya
from tests.cuda.days import MESHES
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA

InChild = Callable[..., Any]
README = (Path(__file__).parents[2] / "README.md").read_text()


def readme(axes: dict[str, int]) -> tuple[float, str, str]:
    """Runs the README's first code on the device. Returns the last loss, and where it and the batch are."""
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    with fake_cuda(), rank_of(axes) as mesh:
        names: dict[str, Any] = {"MESH": mesh}
        exec(code.replace("ya.mesh()", "MESH"), names)
        loss, tokens = names["metrics"]["loss"], names["batch"]["tokens"]
        return loss.item(), str(loss.device), str(tokens.device)


def test_the_readme_runs_on_one_gpu_and_on_two(in_child: InChild) -> None:
    for ranks in (1, 2):
        loss, *devices = in_child(readme, {"shard": ranks})
        assert 0 < loss < 30 and devices == ["cuda:0", "cuda:0"]


def moved() -> list[list[str]]:
    """What the host waits for when `shard_batch` gets memory of the host, pinned, and of the device."""
    found = []
    with fake_cuda() as device, rank_of(MESHES["shard"]) as mesh:
        for x in (torch.ones(8, 2), torch.empty(8, 2, pin_memory=True), torch.ones(8, 2, device=CUDA)):
            device.syncs.clear()
            mine = ya.shard_batch({"x": x, "n": 5}, mesh)
            assert mine["x"].device == CUDA and mine["x"].shape == (2, 2) and mine["n"] == 5
            found.append(list(device.syncs))
        assert ya.shard_batch({"scale": torch.tensor(3.0)}, mesh)["scale"].device == CUDA
    return found


def test_a_batch_goes_to_the_device_and_the_host_waits_for_no_pinned_memory(in_child: InChild) -> None:
    assert in_child(moved) == [["a copy from the host"], [], []]
