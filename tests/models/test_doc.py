"""The family that docs/models.md adds: it computes, decodes, trains, and goes through files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import yafsdp_fn as ya
from models.files import tree
from tests.harness.oracle import compare
from tests.harness.pages import doc
from tests.models.theirs import draw, with_targets

PAGE = doc("models")


def test_the_family_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    code = re.search(r"## A family of your own.*?```python\n(.*?)```", PAGE, re.S)
    mine = {"__name__": "mine"}
    exec(code.group(1), mine)
    config = mine["Config"](vocab=61, embed=32, ffn=40, layers=2, heads=2, kv_heads=1, head_dim=8, max_length=64)
    tx = ya.optim.adamw(1e-2)
    state = ya.init(mine["params"](config), tx, mesh=ya.mesh(device="cpu"), seed=0)
    tokens = draw(2, 16, most=61)
    step = ya.train_step(mine["loss"](config), tx)
    losses = []
    for _ in range(8):
        state, metrics = step(state, with_targets(tokens))
        losses.append(metrics["loss"].item())
    assert losses[-1] < losses[0] - 0.3
    whole = mine["logits"](config, state.params, tokens)
    cache = mine["decoding"].init_cache(mine["DECODER"], config, 2, 16)
    pieces = [mine["decode"](config, state.params, tokens[:, a:b], cache, a) for a, b in ((0, 9), (9, 10), (10, 16))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=0.0)
    tree.save(mine["FORMAT"], tmp_path, config, state.params)
    loaded, lazy = tree.load(mine["FORMAT"], tmp_path)
    assert loaded == config
    compare(ya.materialize(lazy), state, 0.0, "files")
