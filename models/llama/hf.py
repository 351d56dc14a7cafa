"""Hugging Face's Llama directories, `config.json` and safetensors, in and out, layer by layer.

    config, params = hf.load(directory)            # reads headers; the leaves are `ya.Lazy`
    state = ya.shard(params, tx, mesh=mesh)        # reads one layer at a time, each rank keeps its part
    hf.save(directory, config, state.params)       # gathers one layer at a time, rank 0 writes

A leaf's Hugging Face name is its unit's prefix and its key: there is no table of names and nothing is permuted (both
rotate halves), so a stack is `torch.stack` of the files' tensors. Tokenizer files are not ours: copy them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from models.llama import model
from models.llama.config import Config, RopeScaling
from models.llama.model import Llama
from models.tensor_files import Stored, Writer, read_json, scan_directory

PREFIX = Llama(embed="model.embed_tokens.", layers="model.layers.{layer}.", head="")

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

GENERATION = "generation_config.json"

SCALING_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings",
}


def load(directory: str | os.PathLike[str], *, pin_norms: bool = False) -> tuple[Config, Llama]:
    """`(config, params)` of a model directory; the leaves are lazy, in the dtype of the files.

    Only headers are read: names, shapes and file lengths are checked here, weights when `ya.shard` or
    `ya.materialize` asks for them, a layer at a time. Raises FileNotFoundError or ValueError naming the file and the
    tensor.

    pin_norms: as in `model.params`
    """
    root = Path(directory)
    config = config_from_json(read_json(root / "config.json"), str(root / "config.json"))
    if (root / GENERATION).is_file():
        config = dataclasses.replace(
            config, generation={**config.generation, "generation_config": read_json(root / GENERATION)}
        )
    stored = scan_directory(root)
    _check_names(root, config, stored)
    abstract = model.params(config, pin_norms=pin_norms)

    def leaf(name: str, param: ya.Param) -> ya.Lazy:
        if "{layer}" not in name:
            found = stored[name]
            _check_shape(found, param.shape)
            return ya.Lazy(param.shape, found.dtype, lambda _: found.read())
        layers = [stored[name.format(layer=layer)] for layer in range(config.layers)]
        for found in layers:
            _check_shape(found, param.shape[1:])
        dtype = functools.reduce(torch.promote_types, (found.dtype for found in layers))

        def read(layer: int | None) -> Tensor:
            if layer is not None:
                return layers[layer].read().to(dtype)
            return torch.stack([found.read().to(dtype) for found in layers])

        return ya.Lazy(param.shape, dtype, read)

    def part(prefix: str, tree: Any) -> Any:
        return optree.tree_map(lambda key, param: leaf(prefix + key, param), ya.names(tree), tree)

    return config, Llama(*map(part, PREFIX, abstract))


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
            raise ValueError(f"{file}: {key} is {values[key]!r}; models.llama computes {value!r} only")
    defaults = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
    values = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    for key in FIELDS.values():  # the first files had neither: multi-head attention, heads that fill the stream
        if key not in values and key not in ("num_key_value_heads", "head_dim"):
            raise ValueError(f"{file}: no {key}; expected the config of a LlamaForCausalLM")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    theta, scaling = _rope_from(values, file)
    fields = {field: values[key] for field, key in FIELDS.items()}
    tokens = {key: value for key, value in values.items() if key.endswith("_token_id")}
    try:
        return Config(**fields, rope_theta=theta, rope_scaling=scaling, generation=tokens)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


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
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", values.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{file}: rope_type is {kind!r}; models.llama computes 'default' and 'llama3' only")
    missing = [key for key in SCALING_FIELDS.values() if key not in rope]
    if missing:
        raise ValueError(f"{file}: rope_type 'llama3' without {', '.join(missing)}")
    return theta, RopeScaling(**{field: rope[key] for field, key in SCALING_FIELDS.items()})


def _names(config: Config) -> Iterator[str]:
    """Every tensor name of a model's files."""
    abstract = model.params(config)
    for key in abstract.embed:
        yield PREFIX.embed + key
    for layer in range(config.layers):
        for key in abstract.layers.tree:
            yield PREFIX.layers.format(layer=layer) + key
    for key in abstract.head:
        yield PREFIX.head + key


def _check_names(root: Path, config: Config, stored: Mapping[str, Stored]) -> None:
    expected = set(_names(config))
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")  # some files have the embedding a second time
    missing, extra = sorted(expected - stored.keys()), sorted(stored.keys() - expected - ignored)
    if missing:
        hint = "is the model tied (tie_word_embeddings)?" if missing == ["lm_head.weight"] else "copy the model again"
        raise ValueError(f"{root}: no {_few(missing)} in any file, as config.json has it; {hint}")
    if extra:
        raise ValueError(f"{root}: {_few(extra)} has no place in a Llama of this config.json; is it another model?")


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_shape(found: Stored, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ValueError(
            f"{found.file}: {found.name} has shape {found.shape}, config.json makes it {shape}; "
            f"the two are of different models"
        )


def save(
    directory: str | os.PathLike[str],
    config: Config,
    params: Llama,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `config.json` and safetensors that transformers and `load` read, in place of any model in `directory`, and
    `generation_config.json` where `load` found one: end tokens and the like stay what they were.

    params: plain or sharded. A sharded tree is gathered a layer at a time: every rank must call, rank 0 writes, and
        all return when the files are there
    dtype: what every tensor is converted to; None keeps that of `params`, the masters' of a sharded tree
    max_shard_bytes: no file passes this, unless a single tensor does; several files get an index

    Raises ValueError where a tensor is not of the config's shape; an earlier model in `directory` is then kept.
    """
    root, writes = Path(directory), not dist.is_initialized() or dist.get_rank() == 0
    abstract = model.params(config)
    writer = Writer(root, _names(config), max_shard_bytes=max_shard_bytes) if writes else None

    def write(prefix: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != shapes.keys():
            raise ValueError(f"{prefix}*: expected the tensors {sorted(shapes)} of the config, got {sorted(weights)}")
        for key, shape in shapes.items():
            if weights[key].shape != shape:
                got = tuple(weights[key].shape)
                raise ValueError(f"{prefix}{key} has shape {got}, the config makes it {shape}; pass the one it has")
            if writer is not None:
                writer.add(prefix + key, weights[key] if dtype is None else weights[key].to(dtype))

    with writer or contextlib.nullcontext():
        for prefix, leaves, unit in (
            (PREFIX.embed, abstract.embed, params.embed),
            (PREFIX.head, abstract.head, params.head),
        ):
            write(prefix, {key: leaf.shape for key, leaf in leaves.items()}, ya.strip(ya.unshard(unit)))
        count, shapes = itertools.count(), {key: leaf.shape[1:] for key, leaf in abstract.layers.tree.items()}

        def write_layer(weights: Mapping[str, Tensor]) -> None:
            if (layer := next(count)) < config.layers:
                write(PREFIX.layers.format(layer=layer), shapes, weights)

        ya.map_layers(write_layer, params.layers)
        if (found := next(count)) != config.layers:
            raise ValueError(
                f"the params have {found} layers, the config has {config.layers}; pass the config they have"
            )
    if writer is not None:
        assert writer.dtype is not None
        files = {"config.json": config_to_json(config, writer.dtype)}
        if "generation_config" in config.generation:
            files[GENERATION] = config.generation["generation_config"]
        for name, values in files.items():
            (root / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if isinstance(params.layers, ya.Sharded) and dist.is_initialized():
        dist.barrier()
