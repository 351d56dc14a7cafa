"""The same functions on a sharded state: the numbers of the plain tree, at one rank to the bit, and files of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pool

# odd sizes: no leaf is divisible by a number of ranks
CONFIG = llama.Config(vocab=61, embed=33, ffn=41, layers=3, heads=3, kv_heads=1, head_dim=10, max_length=64)
TIED = dataclasses.replace(CONFIG, tied=True)
TX = ya.optim.adamw(1e-2)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def decoded(config: llama.Config, params: Any) -> list[torch.Tensor]:
    cache = llama.init_cache(config, 2, 16)
    tokens = batch()["tokens"]
    return [llama.decode(config, params, tokens[:, a:b], cache, a) for a, b in ((0, 7), (7, 8), (8, 12))]


def compare(mesh: Any, config: llama.Config, pin_norms: bool) -> None:
    """One rank's part: reading, decoding and three steps, against the plain tree."""
    plain = ya.PlainState.create(llama.params(config), TX, seed=0)
    state = ya.init(llama.params(config, pin_norms=pin_norms), TX, mesh=mesh, seed=0)
    tokens = batch()["tokens"]
    assert torch.equal(llama.logits(config, state.params, tokens), llama.logits(config, plain.params, tokens))
    for got, expected in zip(decoded(config, state.params), decoded(config, plain.params), strict=True):
        assert torch.equal(got, expected)
    step = ya.train_step(llama.loss(config), TX)
    for _ in range(3):
        state, got = step(state, batch())
        plain, expected = step(plain, batch())
        torch.testing.assert_close(got["loss"], expected["loss"], atol=0.0, rtol=1e-6)
    for a, b in zip(optree.tree_leaves(ya.unshard(state)), optree.tree_leaves(plain.params), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("config", "pin_norms"), [(CONFIG, False), (TIED, False), (CONFIG, True)], ids=["untied", "tied", "pinned"]
)
def test_sharded_equals_plain(pools: dict[int, Pool], world: int, config: llama.Config, pin_norms: bool) -> None:
    pools[world].run(compare, config, pin_norms)


def test_pinned_norms_are_one_unit() -> None:
    state = ya.init(llama.params(CONFIG, pin_norms=True), TX, mesh=ya.mesh(device="cpu"))
    norms = next(unit for unit in state.memory.units if unit.name == "layers.pinned")
    E, L = CONFIG.embed, CONFIG.layers
    assert norms.stack is None and norms.numel == 104 + L * E  # two leaves, the second aligned
    layers = [unit.numel for unit in state.memory.units if unit.stack == "layers"]
    assert len(layers) == L and sum(layers) < CONFIG.num_parameters - 2 * L * E


def save_and_load(
    mesh: Any, directory: Path, config: llama.Config, compute: torch.dtype, pin_norms: bool
) -> list[torch.Tensor]:
    """Saves a trained state and shards what was saved; gives the whole tensors."""
    precision = ya.Precision(compute=compute)
    state = ya.init(llama.params(config, pin_norms=pin_norms), TX, mesh=mesh, seed=1, precision=precision)
    state, _ = ya.train_step(llama.loss(config), TX)(state, batch())
    llama.hf.save(directory, config, state.params, max_shard_bytes=20_000)
    loaded_config, lazy = llama.hf.load(directory, pin_norms=pin_norms)
    assert loaded_config == config
    again = ya.shard(lazy, TX, mesh=mesh, precision=precision)
    shards: Sequence[torch.Tensor] = optree.tree_leaves(state.params)
    assert all(torch.equal(a, b) for a, b in zip(optree.tree_leaves(again.params), shards, strict=True))
    whole: list[torch.Tensor] = optree.tree_leaves(ya.unshard(state))
    return whole


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("compute", "pin_norms"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "pinned"],
)
def test_files_hold_the_masters_of_a_sharded_state(
    pools: dict[int, Pool], tmp_path: Path, world: int, compute: torch.dtype, pin_norms: bool
) -> None:
    pytest.importorskip("safetensors", reason="reads and writes safetensors")
    expected = pools[world].run(save_and_load, tmp_path, TIED, compute, pin_norms)[0]
    got = optree.tree_leaves(ya.materialize(llama.hf.load(tmp_path)[1]))
    assert len(got) == len(expected) and len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
