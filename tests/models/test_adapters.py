"""Adapters of every family: merged, as transformers reads them, and alone, as peft does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import models
import yafsdp_fn as ya
from models import llama, mixtral
from tests.harness.oracle import compare
from tests.harness.pool import Pools
from tests.models.test_other_configs import SMALL
from tests.models.theirs import OTHERS, Pair, draw, with_targets
from tests.modules.test_lora_on_ranks import every_matrix


def adapt(mesh: Any, source: Path, folder: Path, where: Any, dtype: torch.dtype | None, alone: bool) -> tuple[Any, Any]:
    """Trains adapters on this rank's part, and saves them merged and alone. Returns logits here, and merged weights."""
    config, lazy = models.hf.load(source)
    tx = ya.optim.adamw(3e-2)
    state = ya.shard(ya.lora(lazy, 4, where, alpha=6, dtype=dtype), tx, mesh=mesh)
    step = ya.train_step(models.of(config).loss(config), tx)
    for seed in range(3):
        state, _ = step(state, with_targets(draw(2, 32, seed=seed + 10 * mesh.get_rank())))
    models.hf.save(folder / "merged", config, state.params)
    if alone:
        models.hf.save_adapters(folder / "adapters", config, state.params, base=str(source))
    return models.of(config).logits(config, state.params, draw(2, 50)), ya.merge_lora(state)


def in_attention(path: str, param: ya.Param) -> bool:
    return "attn" in path and len(param.shape) == 2


CASES = [(name, in_attention if name == "mixtral" else None, None) for name in OTHERS]
CASES += [("gqa", every_matrix, None), ("tied", None, torch.int8)]


@pytest.mark.parametrize(("pair", "where", "dtype"), CASES, indirect=["pair"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_merged_and_alone_are_read_by_transformers_and_peft(
    pair: Pair, where: Any, dtype: torch.dtype | None, pools: Pools, tmp_path: Path
) -> None:
    """Alone where peft has such adapters, and the base that they were trained on."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    peft = pytest.importorskip("peft", reason="reads adapters with peft")
    alone = where is not every_matrix and dtype is None
    on_ranks, whole = pools[2].run(adapt, pair.directory, tmp_path, where, dtype, alone)[0]
    config, lazy = models.hf.load(tmp_path / "merged")
    tokens = draw(2, 50)
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    params = ya.materialize(lazy)
    compare(params, whole, 0.0, "files and merge_lora")
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.directory)
    with torch.no_grad():
        expected = models.of(config).logits(config, params, tokens)
        torch.testing.assert_close(merged.eval()(tokens).logits, expected, atol=2e-5, rtol=0.0)
        torch.testing.assert_close(on_ranks, expected, atol=1e-4, rtol=1e-4)
        assert (pair.theirs(tokens).logits - expected).abs().max() > 0.1, "they do something"
        if not alone:
            return
        apart = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        torch.testing.assert_close(apart(tokens).logits, expected, atol=5e-5, rtol=0.0)
    assert sum("lora_B" in name for name, _ in apart.named_parameters()) == 3 * len(
        apart.peft_config["default"].target_modules
    )


def test_adapters_that_peft_has_not_are_refused(tmp_path: Path) -> None:
    config = SMALL["mixtral"]
    mesh = ya.mesh(device="cpu")
    plain = ya.materialize(mixtral.params(config), seed=0)
    adapted = ya.init(ya.lora(mixtral.params(config), 2), mesh=mesh).params
    with pytest.raises(ValueError, match="these params have no adapters to save"):
        models.hf.save_adapters(tmp_path, config, plain)
    with pytest.raises(ValueError, match=r"peft has no adapter for block_sparse_moe.gate of a Mixtral; choose others"):
        models.hf.save_adapters(tmp_path, config, adapted)
    assert list(tmp_path.iterdir()) == []
    # a gain that is trained, too
    config = SMALL["llama"]
    tree = ya.lora(llama.params(config), 2)
    params = ya.init(tree, mesh=mesh).params
    gain = {"input_layernorm.weight": ya.Param((config.layers, config.embed))}
    more = ya.init(tree._replace(layers=ya.Stacked(tree.layers.tree | gain)), mesh=mesh).params
    with pytest.raises(ValueError, match=r"layers.input_layernorm.weight are trained beside the adapters, and a file"):
        models.hf.save_adapters(tmp_path, config, more)
    # a model and an adapter in one directory, which are one model to transformers
    models.hf.save(tmp_path / "model", config, params)
    with pytest.raises(
        ValueError, match=r"model: config.json is there. To transformers a directory with an adapter of"
    ):
        models.hf.save_adapters(tmp_path / "model", config, params)
    models.hf.save_adapters(tmp_path / "alone", config, params)
    with pytest.raises(ValueError, match=r"alone: adapter_config.json is there. To transformers a directory"):
        models.hf.save(tmp_path / "alone", config, params)
    with pytest.raises(ValueError, match=r"alone: adapter_config.json is there. To transformers a directory"):
        models.hf.load(tmp_path / "alone")
