"""What a state across stages gives without a derivative, outside of a step: decoding, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.meshes import mesh_of
from tests.harness.pool import on_ranks
from tests.steps.staged.models import F64

CONFIG = llama.Config(vocab=19, embed=16, ffn=24, layers=3, heads=2, kv_heads=1, head_dim=8, max_length=32, tied=True)


def drawn(params: Any) -> list[torch.Tensor]:
    """Scores after a prompt and after each of four tokens."""
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    cache = llama.init_cache(CONFIG, 1, 16, torch.float64)
    scores = [llama.decode(CONFIG, params, tokens, cache, 0)[:, -1]]
    for at in range(4):
        scores.append(llama.decode(CONFIG, params, scores[-1].argmax(-1)[:, None], cache, 5 + at)[:, -1])
    return scores


@on_ranks(2, 4)
def test_decoding_across_stages(_: Any) -> None:
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.long), "targets": torch.zeros(1, 8, dtype=torch.long)}
    trace = ya.planner.trace(llama.loss(CONFIG), llama.params(CONFIG), batch, precision=F64)
    assignment = ya.schedules.assign(trace, 2)
    state = ya.init(llama.params(CONFIG), mesh=mesh_of(stage=2), precision=F64, stages=assignment)
    for got, expected in zip(drawn(state.params), drawn(ya.unshard(state)), strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="a derivative outside of a step"):
        llama.loss(CONFIG)(state.params, batch)
