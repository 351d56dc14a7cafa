"""A sharded Llama: its pinned norms, and files, which are read and written a layer at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import yafsdp_fn as ya
from models import llama
from tests.harness.oracle import compare
from tests.harness.pool import Pools
from tests.models.theirs import draw, with_targets

# odd sizes: no leaf is divisible by a number of ranks
CONFIG = llama.Config(vocab=61, embed=33, ffn=41, layers=3, heads=3, kv_heads=1, head_dim=10, max_length=64)
TIED = dataclasses.replace(CONFIG, tied=True)
TX = ya.optim.adamw(1e-2)


def test_pinned_norms_are_one_unit() -> None:
    """Beside those of the layers, which are smaller by as much."""
    state = ya.init(llama.params(CONFIG, pin_norms=True), TX, mesh=ya.mesh(device="cpu"))
    norms = next(unit for unit in state.memory.units if unit.name == "layers.pinned")
    E = CONFIG.embed
    L = CONFIG.layers
    assert norms.stack is None and norms.numel == 104 + L * E  # two leaves, the second aligned
    layers = [unit.numel for unit in state.memory.units if unit.stack == "layers"]
    assert len(layers) == L
    assert sum(layers) < CONFIG.num_parameters - 2 * L * E


def save_and_load(
    mesh: Any, directory: Path, config: llama.Config, compute: torch.dtype, pin_norms: bool
) -> list[torch.Tensor]:
    """Saves a trained state and shards what was saved; gives the whole tensors."""
    precision = ya.Precision(compute=compute)
    state = ya.init(llama.params(config, pin_norms=pin_norms), TX, mesh=mesh, seed=1, precision=precision)
    batch = with_targets(draw(2, 16, seed=0, most=CONFIG.vocab))  # the same on all ranks
    state, _ = ya.train_step(llama.loss(config), TX)(state, batch)
    llama.hf.save(directory, config, state.params, max_shard_bytes=20_000)
    loaded_config, lazy = llama.hf.load(directory, pin_norms=pin_norms)
    assert loaded_config == config
    again = ya.shard(lazy, TX, mesh=mesh, precision=precision)
    compare(again.params, state.params, 0.0, "files")
    return optree.tree_leaves(ya.unshard(state))


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("compute", "pin_norms"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "pinned"],
)
def test_files_hold_the_masters_of_a_sharded_state(
    pools: Pools, tmp_path: Path, world: int, compute: torch.dtype, pin_norms: bool
) -> None:
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    expected = pools[world].run(save_and_load, tmp_path, TIED, compute, pin_norms)[0]
    got = optree.tree_leaves(ya.materialize(llama.hf.load(tmp_path)[1]))
    assert len(got) == len(expected)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


# ---- memory

DEEP = dataclasses.replace(CONFIG, embed=48, ffn=64, heads=3, head_dim=16, layers=24, vocab=32)


def most_bytes(mesh: Any, directory: Path) -> tuple[int, int, int]:
    """The most memory of tensors that is there at once beyond what was: of a load with its shards, and of a save; the
    bytes of this rank's shards."""

    def most(run: Any) -> tuple[int, Any]:
        memory = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with memory:
            out = run()
        events = [event for event in memory.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak, out

    loading, state = most(lambda: ya.shard(llama.hf.load(directory)[1], mesh=mesh))
    saving, _ = most(lambda: llama.hf.save(directory.parent / "again", DEEP, state.params, max_shard_bytes=100_000))
    return loading, saving, sum(leaf.nbytes for leaf in optree.tree_leaves(state.params))


@pytest.mark.parametrize("world", [1, 2])
def test_layers_are_read_and_written_one_at_a_time(pools: Pools, tmp_path: Path, world: int) -> None:
    # small files: one that is mapped counts as memory, though pages that nobody touches take none
    llama.hf.save(tmp_path / "model", DEEP, ya.materialize(llama.params(DEEP), seed=1), max_shard_bytes=20_000)
    layer = 4 * (DEEP.num_parameters - 2 * DEEP.vocab * DEEP.embed - DEEP.embed) // DEEP.layers
    for loading, saving, shards in pools[world].run(most_bytes, tmp_path / "model"):
        assert shards >= 4 * DEEP.num_parameters // world  # it sees them
        assert shards <= loading < shards + 3 * layer
        assert saving < 3 * layer
        print(f"layers of memory: loading {(loading - shards) / layer:.2f} beside shards, saving {saving / layer:.2f}")
