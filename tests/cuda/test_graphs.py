"""CUDA graphs of visits, with graphs that know memory by its address alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
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


def batch(seed: int, device: Any) -> dict[str, torch.Tensor]:
    tokens = batch_of(0, seed=seed)["tokens"]
    return {"tokens": tokens.to(device), "targets": tokens.roll(1, 1).to(device)}


CONFIG = llama.Config(vocab=37, embed=16, ffn=24, layers=3, heads=2, kv_heads=1, head_dim=8, max_length=8)
PRECISION = PRECISIONS[1]
"""Computes in bf16 and reduces in fp32: products go through scratch on their way to a gradient slot."""


def begun(mesh: Any, graphs: bool) -> tuple[Any, ya.ShardedState]:
    state = ya.init(llama.params(CONFIG), TX, mesh=mesh, precision=PRECISION)
    return ya.train_step(llama.loss(CONFIG), TX, schedule=REMAT, graphs=graphs), state


def trained(device: Any, graphs: bool) -> tuple[list[Any], int]:
    """A Llama's weights after five steps, and how many graphs there were."""
    with rank_of(MESHES["shard"], torch.device(device)) as mesh:
        step, state = begun(mesh, graphs)
        for number in range(5):
            state, _ = step(state, batch(number, device))
        whole = [leaf.tolist() for leaf in optree.tree_leaves(ya.unshard(state.params))]
        return whole, len(step._function._replays) if graphs else 0


def llamas() -> tuple[bool, int]:
    with fake_cuda():
        found, graphs = trained(CUDA, True)
    return found == trained("cpu", False)[0], graphs


def test_a_llama_is_captured(in_child: InChild) -> None:
    assert in_child(llamas) == (True, 4)  # two slots, forward and backward


def scratch_made_anew() -> str:
    """A state's scratch gives way to another, as that of a new state does whose slots lie where the old one's lay."""
    with fake_cuda(), rank_of(MESHES["shard"]) as mesh:
        step, state = begun(mesh, True)
        try:
            for number in range(8):
                if number == 4:
                    assert state.memory._scratch
                    state.memory._scratch.clear()
                state, metrics = step(state, batch(number, CUDA))
        except Freed as error:
            return str(error)
        return "fine" if metrics["loss"].isfinite() else "wrong"


def test_a_graph_is_of_the_scratch_that_its_backward_writes(in_child: InChild) -> None:
    assert in_child(scratch_made_anew) == "fine"
