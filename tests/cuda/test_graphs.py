"""CUDA graphs of visits, with graphs that know memory by its address alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.cuda.days import MESHES, PRECISIONS, REMATS
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.graphs import Freed
from tests.harness.fake_cuda.ranks import rank_of
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.oracle import batch_of

InChild = Callable[..., Any]
TX = ya.optim.adamw(1e-2)
REMAT = ya.schedules.zero3(remat=REMATS["all"])


def batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = batch_of(0, seed=seed)["tokens"]
    return {"tokens": tokens.to(CUDA), "targets": tokens.roll(1, 1).to(CUDA)}


CONFIG = llama.Config(vocab=37, embed=16, ffn=24, layers=3, heads=2, kv_heads=1, head_dim=8, max_length=8)
WIDER, NARROWER = PRECISIONS[1], ya.Precision(reduce=torch.bfloat16)
"""bf16 products for fp32 slots, which one kernel writes; fp32 products for bf16 slots, which go through scratch."""


def begun(mesh: Any, graphs: bool, precision: ya.Precision = NARROWER) -> tuple[Any, ya.ShardedState]:
    state = ya.init(llama.params(CONFIG), TX, mesh=mesh, precision=precision)
    return ya.train_step(llama.loss(CONFIG), TX, schedule=REMAT, graphs=graphs), state


def trained(graphs: bool, precision: ya.Precision) -> tuple[list[Any], int]:
    """A Llama's weights after five steps, and how many graphs there were."""
    with rank_of(MESHES["shard"]) as mesh:
        step, state = begun(mesh, graphs, precision)
        for number in range(5):
            state, _ = step(state, batch(number))
        whole = [leaf.tolist() for leaf in optree.tree_leaves(ya.unshard(state.params))]
        return whole, len(step._function._replays) if graphs else 0


def llamas(precision: ya.Precision) -> tuple[bool, int]:
    with fake_cuda():
        found, graphs = trained(True, precision)
        return found == trained(False, precision)[0], graphs


@pytest.mark.parametrize("precision", [WIDER, NARROWER], ids=["wider", "narrower"])
def test_a_llama_is_captured(in_child: InChild, precision: ya.Precision) -> None:
    assert in_child(llamas, precision) == (True, 4)  # two slots, forward and backward


def scratch_made_anew() -> str:
    """A state's scratch gives way to another, as that of a new state does whose slots lie where the old one's lay."""
    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        step, state = begun(mesh, True)
        try:
            for number in range(8):
                if number == 4:
                    assert state.memory._scratch
                    state.memory._scratch.clear()
                state, metrics = step(state, batch(number))
        except Freed as error:
            return str(error)
        return "fine" if metrics["loss"].isfinite() else "wrong"


def test_a_graph_is_of_the_scratch_that_its_backward_writes(in_child: InChild) -> None:
    assert in_child(scratch_made_anew) == "fine"
