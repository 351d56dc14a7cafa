"""What docs/lora.md shows runs, on files, and does what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.pages import blocks, doc
from tests.harness.pool import Pools
from tests.models.theirs import draw, with_targets

PAGE = doc("lora")
(CODE,) = blocks(PAGE)
CONFIG = llama.Config(vocab=61, embed=32, ffn=40, layers=3, heads=4, kv_heads=2, head_dim=8, max_length=64)
TX = ya.optim.adamw(1e-2)


def batch() -> dict[str, torch.Tensor]:
    return with_targets(draw(2, 16, seed=0, most=CONFIG.vocab))


def runs(mesh: Any, folder: Path) -> None:
    os.chdir(folder)
    names = {"ya": ya, "llama": llama, "torch": torch, "tx": TX, "mesh": mesh, "batch": batch()}
    exec(CODE, names)
    state = names["state"]
    assert state.step == 2
    assert {g.name for g in state.memory.groups if g.trainable} == {"layers", "head"}
    before, after = (ya.materialize(llama.hf.load(name)[1]) for name in ("base", "merged"))
    moved = [name for name, leaf in before.layers.items() if not torch.equal(leaf, after.layers[name])]
    assert [name for name in moved if "norm" not in name] == [name for name in before.layers if "proj" in name]


@pytest.mark.parametrize("world", [1, 2])
def test_the_code_runs(pools: Pools, tmp_path: Path, world: int) -> None:
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    llama.hf.save(tmp_path / "base", CONFIG, ya.materialize(llama.params(CONFIG)))
    pools[world].run(runs, tmp_path)
