"""What a state across stages gives without a derivative, outside of a step: decoding, token by token."""

from __future__ import annotations

from typing import Any

import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pools
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


def check(_: Any, **axes: int) -> None:
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.long), "targets": torch.zeros(1, 8, dtype=torch.long)}
    trace = ya.planner.trace(llama.loss(CONFIG), llama.params(CONFIG), batch, precision=F64)
    mesh = ya.mesh(device="cpu", **axes)
    state = ya.init(llama.params(CONFIG), mesh=mesh, precision=F64, stages=ya.schedules.assign(trace, 2))
    for got, expected in zip(drawn(state.params), drawn(ya.unshard(state)), strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=0)
    try:
        llama.loss(CONFIG)(state.params, batch)
    except RuntimeError as error:
        assert "a derivative outside of a step" in str(error)
    else:
        raise AssertionError("not refused")


def test_decoding_across_stages(pools: Pools) -> None:
    pools[2].run(on, {"stage": 2})
    pools[4].run(on, {"stage": 2})


def on(mesh: Any, axes: dict[str, int]) -> None:
    check(mesh, **axes)
