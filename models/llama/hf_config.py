"""`config.json` of Hugging Face's Llamas, as a `Config` and back."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from models.llama.config import LARGEST, Config, FieldError, RopeScaling

FIELDS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""`Config`'s field: the key of `config.json`. The rotary settings have moved between versions: `_rope_from`."""

SCALING_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings",
}


def config_from_json(values: Mapping[str, Any], file: str = "config.json") -> Config:
    """The `Config` of a parsed `config.json`; `file` is how errors call it. Refuses what our Llama does not compute."""
    expected = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    for key, value in expected.items():
        if values.get(key) not in (value, None):
            raise ValueError(f"{file}: {key} is {_shown(values[key])}; models.llama computes {value!r} only")
    defaults = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
    values = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    for key in FIELDS.values():  # the first files had neither: multi-head attention, heads that fill the stream
        if key not in values and key not in ("num_key_value_heads", "head_dim"):
            raise ValueError(f"{file}: no {key}; expected the config of a LlamaForCausalLM")
    width, heads = values["hidden_size"], values["num_attention_heads"]
    values.setdefault("num_key_value_heads", heads)
    if "head_dim" not in values:
        divide = type(width) is int and type(heads) is int and heads > 0
        values["head_dim"] = width // heads if divide else 2  # one of the two is wrong, and named below
    theta, scaling = _rope_from(values, file)
    fields = {field: values[key] for field, key in FIELDS.items()}
    tokens = {key: value for key, value in values.items() if key.endswith("_token_id")}
    for key, value in tokens.items():
        if any(type(token) is not int for token in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{file}: {key} is {_shown(value)}; expected a token's number, or a list of them")
    try:
        return Config(**fields, rope_theta=theta, rope_scaling=scaling, generation=tokens)
    except FieldError as error:
        raise ValueError(f"{file}: {FIELDS.get(error.field, error.field)}: {error}") from error


def config_to_json(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """What `save` writes as `config.json`: keys that transformers 4 and 5 both read."""
    scaling = None
    if config.rope_scaling is not None:
        scaling = {key: getattr(config.rope_scaling, field) for field, key in SCALING_FIELDS.items()}
        scaling["rope_type"] = "llama3"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, field) for field, key in FIELDS.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key: value for key, value in config.generation.items() if key.endswith("_token_id")},
    }


def _rope_from(values: Mapping[str, Any], file: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps all of it in `rope_parameters`, 4 had `rope_theta` beside `rope_scaling`
    where = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = values.get(where) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: {where} is {_shown(rope)}; expected an object, or null")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    theta = float(theta) if type(theta) is int and theta <= LARGEST else theta
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{file}: rope_type is {_shown(kind)}; models.llama computes 'default' and 'llama3' only")
    missing = [key for key in SCALING_FIELDS.values() if key not in rope]
    if missing:
        raise ValueError(f"{file}: rope_type 'llama3' without {', '.join(missing)}")
    try:
        return theta, RopeScaling(**{field: rope[key] for field, key in SCALING_FIELDS.items()})
    except FieldError as error:
        raise ValueError(f"{file}: {where}: {SCALING_FIELDS[error.field]}: {error}") from error


def _shown(value: Any) -> str:
    return reprlib.repr(value)
