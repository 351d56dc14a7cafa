"""Reads and writes Hugging Face's `config.json`, for all families."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from models.parts.config import LARGEST, FieldError, Shape
from models.parts.rotary import RopeScaling, RotaryShape

C = TypeVar("C", bound=Shape)

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
"""`RotaryShape`'s field: the key of `config.json`. The rotary settings have moved between versions: `_rope_from`."""

SCALING_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings",
}


@dataclasses.dataclass(frozen=True)
class Json:
    """Reads and writes a family's `config.json`.

    expected: keys that have one value or are missing, since nothing else is computed; they are written, too defaults:
        of keys that files may leave out or set to null, as in transformers
    further: the family's own fields: the key of each, and its default when it is left out; null is a value
    """

    model_type: str
    architecture: str
    expected: Mapping[str, Any]
    defaults: Mapping[str, Any]
    fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: FIELDS)
    further: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    theta: float | None = 10_000.0
    """Default rotary base of a file that names none. None: a family without rotary positions."""

    def read(self, config: Callable[..., C], values: Mapping[str, Any], file: str) -> C:
        """Returns the config of a parsed file; `file` is its name in errors. Raises ValueError naming the key."""
        self._check(values, file)
        others = {field: values.get(*key) for field, key in self.further.items()}
        tokens = special_tokens({**self.defaults, **values}, file)
        values = {**self.defaults, **{key: value for key, value in values.items() if value is not None}}
        for key in self.fields.values():
            if key not in values and key not in ("num_key_value_heads", "head_dim"):
                raise ValueError(f"{file}: no {key}; expected the config of a {self.architecture}")
        if "head_dim" in self.fields:  # the first files had neither: multi-head attention, heads that fill the stream
            width = values["hidden_size"]
            heads = values["num_attention_heads"]
            values.setdefault("num_key_value_heads", heads)
            if "head_dim" not in values:
                divide = type(width) is int and type(heads) is int and heads > 0
                values["head_dim"] = width // heads if divide else 2  # one of the two is wrong, and named below
        if self.theta is not None:
            theta, scaling = _rope_from(values, self.theta, self.model_type, file)
            others |= {"rope_theta": theta, "rope_scaling": scaling}
        fields = {field: values[key] for field, key in self.fields.items()}
        # of Mistral, transformers has full attention in the layers that this says so of, whatever `sliding_window` is
        kinds = values.get("layer_types", ())
        kind = "sliding_attention" if others.get("window") else "full_attention"
        if any(each != kind for each in kinds):
            raise ValueError(
                f"{file}: layer_types is {shown(kinds)}; models.{self.model_type} computes {kind!r} in all layers of "
                "this config"
            )
        try:
            return config(**fields, **others, generation=tokens)
        except FieldError as error:
            keys = {**self.fields, **{field: key for field, (key, _) in self.further.items()}}
            raise ValueError(f"{file}: {keys.get(error.field, error.field)}: {error}") from error

    def write(self, config: Shape, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the content of `config.json`, with keys that transformers 4 and 5 both read."""
        rope = {}
        if isinstance(config, RotaryShape):
            rope = {"rope_theta": config.rope_theta, "rope_scaling": _scaling(config.rope_scaling)}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: getattr(config, field) for field, key in self.fields.items()},
            **rope,
            **self.expected,
            **{key: getattr(config, field) for field, (key, _) in self.further.items()},
            "torch_dtype": str(dtype).removeprefix("torch."),
            # null, where there are none: left out, they would be those of the family's first models
            "bos_token_id": None,
            "eos_token_id": None,
            **{key: value for key, value in config.generation.items() if key.endswith("_token_id")},
        }

    def _check(self, values: Mapping[str, Any], file: str) -> None:
        for key, value in {"model_type": self.model_type, "is_causal": True, **self.expected}.items():
            if values.get(key) not in (value, None):
                computes = f"models.{self.model_type} computes {value!r} only"
                raise ValueError(f"{file}: {key} is {shown(values[key])}; {computes}")
        if quantised := values.get("quantization_config"):
            raise ValueError(
                f"{file}: quantization_config is {shown(quantised)}; a quantised model has to be dequantised first: "
                "by transformers' model.dequantize() and save_pretrained"
            )


def special_tokens(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Returns the special tokens that settings name. Raises ValueError naming the key of what is no token."""
    tokens = {key: value for key, value in values.items() if key.endswith("_token_id") and value is not None}
    for key, value in tokens.items():
        if any(type(token) is not int for token in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{file}: {key} is {shown(value)}; expected a token's number, or a list of them")
    return tokens


def _scaling(found: RopeScaling | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**{key: getattr(found, field) for field, key in SCALING_FIELDS.items()}, "rope_type": "llama3"}


def _rope_from(values: Mapping[str, Any], default: float, family: str, file: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps all of it in `rope_parameters`, 4 had `rope_theta` beside `rope_scaling`
    # of both, the older one counts: to a file of version 5 people add it by hand
    where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(where) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: {where} is {shown(rope)}; expected an object, or null")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"{file}: {where} has settings for each kind of layer; models.{family} computes one rotation in all layers"
        )
    theta = rope.get("rope_theta", values.get("rope_theta", default))
    theta = float(theta) if type(theta) is int and theta <= LARGEST else theta
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{file}: rope_type is {shown(kind)}; models.{family} computes 'default' and 'llama3' only")
    missing = [key for key in SCALING_FIELDS.values() if key not in rope]
    if missing:
        raise ValueError(f"{file}: rope_type 'llama3' without {', '.join(missing)}")
    original = SCALING_FIELDS["original_max_length"]
    if values.get(original, rope[original]) != rope[original]:
        # transformers 4 takes the latter, 5 the former
        raise ValueError(f"{file}: {original} has one value in {where} and another beside it; make them equal")
    try:
        return theta, RopeScaling(**{field: rope[key] for field, key in SCALING_FIELDS.items()})
    except FieldError as error:
        raise ValueError(f"{file}: {where}: {SCALING_FIELDS[error.field]}: {error}") from error


def shown(value: Any) -> str:
    return reprlib.repr(value)
