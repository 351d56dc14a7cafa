"""Adapters of every family beside Llama: merged, as transformers reads them, and alone, as peft does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import models
import yafsdp_fn as ya
from models import mixtral
from tests.harness.pool import Pools
from tests.models.test_other_configs import SMALL
from tests.models.theirs import OTHERS, Pair, draw, with_targets


def adapt(mesh: Any, source: Path, folder: Path, where: Any) -> None:
    """Trains adapters on this rank's part, and saves them merged and alone."""
    config, lazy = models.hf.load(source)
    tx = ya.optim.adamw(3e-2)
    state = ya.shard(ya.lora(lazy, 4, where, alpha=6), tx, mesh=mesh)
    step = ya.train_step(models.of(config).loss(config), tx)
    for seed in range(3):
        state, _ = step(state, with_targets(draw(2, 32, seed=seed + 10 * mesh.get_rank())))
    models.hf.save(folder / "merged", config, state.params)
    models.hf.save_adapters(folder / "adapters", config, state.params, base=str(source))


def in_attention(path: str, param: ya.Param) -> bool:
    return "attn" in path and len(param.shape) == 2


@pytest.mark.parametrize("pair", OTHERS, indirect=True)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_merged_and_alone_are_read_by_transformers_and_peft(pair: Pair, pools: Pools, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    peft = pytest.importorskip("peft", reason="reads adapters with peft")
    where = in_attention if pair.name == "mixtral" else None
    pools[2].run(adapt, pair.directory, tmp_path, where)
    config, lazy = models.hf.load(tmp_path / "merged")
    tokens = draw(2, 50)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.directory)
    with torch.no_grad():
        expected = models.of(config).logits(config, ya.materialize(lazy), tokens)
        torch.testing.assert_close(merged(tokens).logits, expected, atol=2e-5, rtol=0.0)
        apart = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        torch.testing.assert_close(apart(tokens).logits, expected, atol=5e-5, rtol=0.0)
        assert (pair.theirs(tokens).logits - expected).abs().max() > 0.1, "they do something"
    assert sum("lora_B" in name for name, _ in apart.named_parameters()) == 3 * len(
        apart.peft_config["default"].target_modules
    )


def test_adapters_that_peft_has_not_are_refused(tmp_path: Path) -> None:
    config = SMALL["mixtral"]
    plain = ya.materialize(mixtral.params(config), seed=0)
    adapted = ya.init(ya.lora(mixtral.params(config), 2), mesh=ya.mesh(device="cpu")).params
    with pytest.raises(ValueError, match="these params have no adapters to save"):
        models.hf.save_adapters(tmp_path, config, plain)
    with pytest.raises(ValueError, match=r"peft has no adapter for block_sparse_moe.gate of a Mixtral; choose others"):
        models.hf.save_adapters(tmp_path, config, adapted)
    assert list(tmp_path.iterdir()) == []
