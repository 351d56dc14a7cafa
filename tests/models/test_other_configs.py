"""Configs of all families: published sizes, what files may say, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import models
import yafsdp_fn as ya
from models import gpt2, llama, mistral, mixtral, qwen3
from tests.harness.oracle import compare
from tests.models.test_llama_hf import edit_config

safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads and writes safetensors")

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
}
SHAPE = {"vocab": 61, "embed": 32, "ffn": 40, "layers": 2, "heads": 2, "max_length": 64}
HEADS = {**SHAPE, "kv_heads": 1, "head_dim": 8}
SMALL = {
    "llama": llama.Config(**HEADS),
    "qwen3": qwen3.Config(**HEADS),
    "mistral": mistral.Config(**HEADS, window=9),
    "gpt2": gpt2.Config(**SHAPE),
    "mixtral": mixtral.Config(**HEADS, experts=3),
}


def test_counts_are_the_published_ones_and_those_of_the_trees() -> None:
    named = [name for family in models.FAMILIES for name in family.CONFIGS]
    assert len(named) == len(set(named)) == len(models.CONFIGS), "names are unique"
    debug = {"debug", *(f"debug-{name}" for name in SMALL if name != "llama")}
    assert set(named) == PUBLISHED.keys() | debug
    assert 3.5e6 < models.CONFIGS["debug"].num_parameters < 4.5e6
    for name, config in models.CONFIGS.items():
        assert config.num_parameters == PUBLISHED.get(name, config.num_parameters), name
        leaves = optree.tree_leaves(models.of(config).params(config, pin_norms=True))
        assert sum(math.prod(leaf.shape) for leaf in leaves) == config.num_parameters, name
    assert models.CONFIGS["mixtral-8x7b"].multiplied == 12_879_925_248 - 32_000 * 4096  # 12.9B active
    with pytest.raises(
        TypeError, match=r"dict is no config of a model: expected one of models\.llama\.Config, models\.qw"
    ):
        models.of({})


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("llama", {"kv_heads": 3}, "Config.kv_heads: 3 does not divide heads=2"),
        ("llama", {"head_dim": 63}, "Config.head_dim: expected an even number, got 63"),
        ("llama", {"layers": 0}, "Config.layers: expected a positive integer, got 0"),
        ("llama", {"vocab": 256.0}, "Config.vocab: expected a positive integer, got 256.0"),
        ("llama", {"ffn": True}, "Config.ffn: expected a positive integer, got True"),
        ("llama", {"norm_eps": 0.0}, "Config.norm_eps: expected a positive number, got 0.0"),
        ("llama", {"rope_theta": math.inf}, "Config.rope_theta: expected a positive number, got inf"),
        ("mistral", {"window": 0}, "Config.window: expected a positive integer, got 0"),
        ("gpt2", {"heads": 3}, "Config.heads: 3 does not divide embed=32"),
        ("mixtral", {"chosen": 4}, "Config.chosen: 4 experts for a token, and there are 3"),
        ("mixtral", {"router_loss": 1}, "Config.router_loss: expected True or False, got 1"),
        ("mixtral", {"router_coef": -1.0}, "Config.router_coef: expected a number of at least 0, got -1.0"),
    ],
)
def test_fields_that_are_refused(name: str, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        dataclasses.replace(SMALL[name], **change)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"factor": 0.5}, r"RopeScaling.factor: expected a number of at least 1, got 0.5"),
        ({"factor": 8.0, "low_freq_factor": 4.0}, r"RopeScaling.low_freq_factor: .* got 4.0 and 4.0"),
        ({"factor": 8.0, "original_max_length": 0}, r"RopeScaling.original_max_length: expected a positive integer"),
    ],
)
def test_rope_scaling_refusals(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        llama.RopeScaling(**arguments)


def saved(root: Path, name: str, **changes: Any) -> Any:
    """A model in `root` whose config.json is changed; ... removes a key. Gives its parameters."""
    params = ya.materialize(models.of(SMALL[name]).params(SMALL[name]), seed=3)
    models.hf.save(root, SMALL[name], params)
    edit_config(root, **changes)
    return params


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True; models.qwen3 computes False only"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'; models.qwen3 computes 'default' and"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters has settings for each kind",
        ),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; a quantised model has to"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention', 'full_attention']; mo"),
        ("gpt2", {"is_causal": False}, "is_causal is False; models.gpt2 computes True only"),
        ("mistral", {"sliding_window": -1}, "sliding_window: Config.window: expected a positive integer, got -1"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'; models.gpt2 computes 'gelu_new'"),
        ("gpt2", {"n_layer": ...}, "no n_layer; expected the config of a GPT2LMHeadModel"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; models.mixtral computes 0.0 only"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: Config.chosen: 9 experts for a token, and there"),
        ("mixtral", {"model_type": "gemma"}, "model_type is 'gemma'; there are llama, qwen3, mistral, gpt2, mixtral"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], text: str) -> None:
    saved(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'config.json'}: {text}")):
        models.hf.load(tmp_path)


def test_what_files_leave_out_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    def left_out(name: str, *keys: str) -> Any:
        saved(tmp_path / name, name, **dict.fromkeys(keys, ...))
        return models.hf.load(tmp_path / name)[0]

    found = left_out("mistral", "sliding_window", "rope_theta", "eos_token_id")
    assert found.window == 4096
    assert found.generation == {"eos_token_id": 2}
    found = left_out("mixtral", "rope_theta", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    assert found == dataclasses.replace(SMALL["mixtral"], rope_theta=1e6)
    saved(tmp_path / "none", "mistral", sliding_window=None)
    assert models.hf.load(tmp_path / "none")[0].window is None


def test_the_first_gpt2_files_had_other_names_and_masks(tmp_path: Path) -> None:
    params = saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in safetensors_torch.load_file(file).items()}
    tensors["h.1.attn.bias"] = torch.ones(1, 1, 64, 64)
    safetensors_torch.save_file(tensors, file)
    loaded = ya.materialize(models.hf.load(tmp_path)[1])
    compare(loaded, params, 0.0, "files")
    safetensors_torch.save_file({**tensors, "transformer.wpe.weight": tensors["wpe.weight"].clone()}, file)
    with pytest.raises(ValueError, match=r"wpe.weight is .*wpe.weight once more; delete one of them"):
        models.hf.load(tmp_path)
    with pytest.raises(ValueError, match=r"positions 0 to 64: this model has 64 of them \(max_length\); shorten"):
        gpt2.logits(SMALL["gpt2"], params, torch.zeros(1, 65, dtype=torch.long))
