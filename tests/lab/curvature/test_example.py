"""docs/examples/curvature.py runs, on a model that is smaller than its own, and draws its picture."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from models import llama
from tests.harness.pool import ROOT, Pool


def runs(mesh: Any, out: Path) -> None:
    spec = importlib.util.spec_from_file_location("curvature", Path(ROOT, "docs", "examples", "curvature.py"))
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = dataclasses.replace(llama.CONFIGS["debug"], embed=16, ffn=16, layers=2, heads=2, kv_heads=1, head_dim=8)
    example.CONFIG, example.loss = config, llama.loss(config)
    example.WINDOWS, example.LENGTH, example.STEPS, example.OUT = 1, 8, (1,), out
    example.main()


def test_the_example(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[1].run(runs, tmp_path / "curvature.png")
    assert (tmp_path / "curvature.png").read_bytes().startswith(b"\x89PNG")
