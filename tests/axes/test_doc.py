"""docs/axes.md: its example runs, on plain tensors and on a tensor axis alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.axes.model import mesh_of
from tests.harness.pool import Pools

PAGE = Path(__file__).parents[2] / "docs" / "axes.md"


def example() -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], space)
    return space


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 16, generator=generator) for name in "xy"}


def run(_: Any) -> float:
    return float(example()["train"](mesh_of(tensor=2), batch()))


def test_the_example_is_short_and_runs(pools: Pools) -> None:
    page = example()
    state = ya.PlainState.create(page["params"], ya.optim.adamw(1e-3))
    want = float(ya.train_step(page["loss_fn"], ya.optim.adamw(1e-3))(state, batch())[1]["loss"])
    for got in pools[2].run(run):
        assert abs(got - want) < 1e-5 * want
    lines = PAGE.read_text().split("```python\n")[1].split("```")[0].splitlines()
    assert len([line for line in lines if line and not line.startswith(("import", "from"))]) <= 20


def test_the_picture_is_made_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[2].split("```")[0], space)
    assert (tmp_path / "axes.png").read_bytes()[1:4] == b"PNG"
    for line in "in layers[0] to layers[5]: all_gather tensor (131,072.0 KiB), psum_scatter tensor", "; backward: ":
        assert line in str(space["program"])
        assert line.strip() in PAGE.read_text()
