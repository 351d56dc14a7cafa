"""Hugging Face directories in and out: bits, names, files, configs, and what is said of damaged ones."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import models
import yafsdp_fn as ya
from models import llama
from tests.harness.oracle import compare
from tests.models.theirs import TINY, draw, their_model

safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads and writes safetensors")


def saved(directory: Path, config: llama.Config = TINY, **options: Any) -> Any:
    """Saves a model of `config` and gives its plain parameters."""
    params = ya.materialize(llama.params(config), seed=3)
    llama.hf.save(directory, config, params, **options)
    return params


def loaded(directory: Path) -> Any:
    """The plain parameters of a saved model."""
    return ya.materialize(llama.hf.load(directory)[1])


def refused(directory: Path, text: str, kind: Any = ValueError) -> None:
    with pytest.raises(kind, match=text):
        llama.hf.load(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Rewrites the single file; None removes a tensor. Dots in names are written as two underscores."""
    file = directory / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    safetensors_torch.save_file(tensors, file)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000, 1])
def test_round_trip(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    config = dataclasses.replace(TINY, tied=tied, rope_scaling=llama.RopeScaling(factor=4.0), rope_theta=5e5)
    params = saved(tmp_path, config, max_shard_bytes=max_shard_bytes)
    loaded_config, lazy = llama.hf.load(tmp_path)
    assert loaded_config == config
    compare(ya.materialize(lazy), params, 0.0, "bits")
    files = sorted(file.name for file in tmp_path.iterdir())
    if max_shard_bytes > 10**9:
        assert files == ["config.json", "model.safetensors"]
        return
    weights = [name for name in files if name.startswith("model-")]
    assert set(files) == {"config.json", "model.safetensors.index.json", *weights}
    assert len(weights) > 3
    assert weights[0] == f"model-00001-of-{len(weights):05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * config.num_parameters
    for name in weights:  # the library itself reads each of them, and none passes the limit but by one tensor alone
        tensors = safetensors_torch.load_file(tmp_path / name)
        assert all(index["weight_map"][key] == name for key in tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= max_shard_bytes


def test_dtype_converts_and_is_recorded(tmp_path: Path) -> None:
    params = saved(tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    compare(loaded(tmp_path), optree.tree_map(lambda leaf: leaf.bfloat16(), params), 0.0, "bits")
    with pytest.raises(TypeError, match=r"dtype='bfloat16': expected None, or a dtype of torch such as"):
        saved(tmp_path, dtype="bfloat16")


def test_mixed_dtypes_stay_aligned(tmp_path: Path) -> None:
    params = ya.materialize(llama.params(dataclasses.replace(TINY, vocab=61, embed=33)), seed=3)
    params.embed["weight"] = params.embed["weight"].bfloat16()  # 61 * 33 elements: fp32 behind it would be misaligned
    config = dataclasses.replace(TINY, embed=33)
    llama.hf.save(tmp_path, config, params)
    compare(loaded(tmp_path), params, 0.0, "bits")


def test_load_reads_no_weights_until_asked_and_then_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from yafsdp_fn.util.tensor_files import StoredTensor

    params = saved(tmp_path)
    read: list[str] = []
    original = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: (read.append(self.name), original(self))[1])
    _, lazy = llama.hf.load(tmp_path)
    with pytest.raises(TypeError, match=r"weights are lazy, as models.hf.load gives them: ya.shard or ya.materialize"):
        llama.logits(TINY, lazy, draw(1, 4))
    leaf = lazy.layers.tree["mlp.up_proj.weight"]
    assert read == []
    assert leaf.shape == (3, 40, 32)
    assert leaf.dtype == torch.float32
    assert torch.equal(leaf.load(1), params.layers["mlp.up_proj.weight"][1])
    assert read == ["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(leaf.load(None), params.layers["mlp.up_proj.weight"])


def test_leftover_rotary_buffers_and_a_second_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    params = saved(tmp_path, dataclasses.replace(TINY, tied=True))
    edit_tensors(
        tmp_path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        lm_head__weight=params.embed["weight"].clone(),
    )
    compare(loaded(tmp_path), params, 0.0, "bits")
    edit_tensors(tmp_path, model__embed_tokens__weight=None)  # of which the second copy is the only one
    compare(loaded(tmp_path), params, 0.0, "bits")


@pytest.mark.parametrize("name", ["tied", "qwen3-tied", "gpt2"])
def test_a_tied_model_whose_files_hold_another_head_is_untied_with_a_warning_as_in_transformers(
    name: str, tokens: torch.Tensor, tmp_path: Path
) -> None:
    import transformers

    their_model(name).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lm_head__weight=torch.randn(97, 64))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.warns(UserWarning, match=r"model.safetensors holds another lm_head.weight than .*: they are not tied"):
        config, lazy = models.hf.load(tmp_path)
    params = ya.materialize(lazy)
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(models.of(config).logits(config, params, tokens), expected, atol=2e-4, rtol=0)
    models.hf.save(tmp_path / "again", config, params)
    compare(ya.materialize(models.hf.load(tmp_path / "again")[1]), params, 0.0, "bits")


LLAMA3 = {
    "type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": ...}, 1e4, None),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4, None),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": LLAMA3,
            },
            5e5,
            llama.RopeScaling(factor=32.0),
        ),
        ({"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": LLAMA3}, 1e4, llama.RopeScaling(factor=32.0)),
    ],
)
def test_every_spelling_of_the_rotary_settings(
    tmp_path: Path, rope: dict[str, Any], theta: float, scaling: llama.RopeScaling | None
) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **({"rope_scaling": ...} | rope))
    config, _ = llama.hf.load(tmp_path)
    assert config == dataclasses.replace(TINY, rope_theta=theta, rope_scaling=scaling)


def test_the_first_llamas_had_neither_kv_heads_nor_head_dim(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, kv_heads=4)
    saved(tmp_path, config)
    edit_config(tmp_path, num_key_value_heads=..., head_dim=None)
    assert llama.hf.load(tmp_path)[0] == config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; models.llama computes 'llama' only"),
        ({"attention_bias": True}, "attention_bias is True; models.llama computes False only"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'; models.llama computes 'default'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' without low_freq_factor, high"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
            "original_max_position_embeddings has one val",
        ),
        ({"hidden_size": ...}, "no hidden_size; expected the config of a LlamaForCausalLM"),
        ({"num_key_value_heads": 3}, "Config.kv_heads: 3 does not divide heads=4"),
        ({"num_hidden_layers": 1_000_000}, "a model of 1000000 layers, and the safetensors files hold 30 tensors"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads: Config.heads: expected a positive integ"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object, or null"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, r"rope_type is \['llama3'\]; models.llama computes 'default'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a token's number, or a list of them"),
        ({"model_type": ["x" * 10**5]}, r"model_type is \['xxx.{,40}xxx'\]; models.llama computes 'llama' only"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    refused(tmp_path, re.escape(f"{tmp_path / 'config.json'}: ") + ".*" + text)


def test_what_ends_a_text_is_kept(tmp_path: Path) -> None:
    """Special tokens and how to generate: nothing here reads them, and who serves the model needs them."""
    saved(tmp_path / "a")
    tokens = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    edit_config(tmp_path / "a", **tokens)
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 7]}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(generation))
    config, lazy = llama.hf.load(tmp_path / "a")
    llama.hf.save(tmp_path / "b", config, ya.materialize(lazy))
    assert tokens.items() <= json.loads((tmp_path / "b" / "config.json").read_text()).items()
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == generation
    assert llama.hf.load(tmp_path / "b")[0] == config
    (tmp_path / "b" / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refused(tmp_path / "b", r"generation_config.json: eos_token_id is '</s>'; expected a token's number, or a list")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(tmp_path, r"pip install .*yafsdp_fn\[hf\]", ImportError)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    refused(tmp_path, r"config.json: no such file; expected a Hugging Face model directory", FileNotFoundError)
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 100, 0):
        file.write_bytes(whole[:cut])
        refused(tmp_path, rf"model.safetensors: damaged or cut short at {cut} bytes \(.*\); copy it again")
    file.unlink()
    refused(tmp_path, r"neither model.safetensors nor model.safetensors.index.json", FileNotFoundError)
    (tmp_path / "config.json").write_text('{"vocab_size": 6')
    refused(tmp_path, r"config.json: damaged or cut short .*; copy it again")


def test_a_file_that_the_index_lists_is_gone(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_bytes=20_000)
    _, lazy = llama.hf.load(tmp_path)
    next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    refused(tmp_path, r"model-00002-of-.*: no such file, though .*index.json", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-.*: no such file, though it was there"):
        ya.materialize(lazy)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    refused(tmp_path, r"index.json: expected a JSON object, got list")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"model__norm__weight": None, "model__layers__2__mlp__up_proj__weight": None},
            r"no model.layers.2.mlp.up_proj.weight \(and 1 more\) in any file, as config.json has it; copy the model",
        ),
        (
            {"model__norm__weight": None, "norm__weight": torch.ones(32)},
            r"no model.norm.weight in any file, as config.json has it; they hold norm.weight instead: is it another mo",
        ),
        ({"lm_head__weight": None}, r"no lm_head.weight in any file, .*; is the model tied"),
        (
            {"model__layers__1__mlp__up_proj__weight": torch.zeros(32, 40)},
            r"safetensors: model.layers.1.mlp.up_proj.weight has shape \(32, 40\), config.json makes it \(40, 32\)",
        ),
        (
            {"model__layers__1__self_attn__q_proj__bias": torch.zeros(32)},
            r"model.layers.1.self_attn.q_proj.bias has no place in a Llama of this config.json",
        ),
        (
            {"model__norm__weight": torch.zeros(32, dtype=torch.int8)},
            r"model.safetensors: model.norm.weight is I8, expected one of F64, F32, F16, BF16; a quantised model",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor | None], text: str) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, **tensors)
    refused(tmp_path, text, (ValueError, TypeError))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (dataclasses.replace(TINY, ffn=48), r"model.layers.0.mlp.gate_proj.weight has shape \(40, 32\), .* \(48, 32\)"),
        (dataclasses.replace(TINY, tied=True), r"\*: expected the tensors \['model.norm.weight'\] of the config, got"),
        (dataclasses.replace(TINY, layers=4), r"the params have 3 layers, the config has 4"),
        (dataclasses.replace(TINY, layers=2), r"the params have 3 layers, the config has 2"),
    ],
)
def test_saving_with_another_config_keeps_the_earlier_model(tmp_path: Path, config: llama.Config, text: str) -> None:
    params = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=text):
        llama.hf.save(tmp_path, config, params)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
