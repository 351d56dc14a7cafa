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
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from models.llama import model
from models.llama.config import Config
from models.llama.hf_config import config_from_json, config_to_json
from models.llama.model import Llama
from models.model_folder import CONFIG, GENERATION, Settings, settings
from models.tensor_files import Stored, save_of, scan_directory
from models.tensor_writer import Writer

PREFIX = Llama(embed="model.embed_tokens.", layers="model.layers.{layer}.", head="")


def load(directory: str | os.PathLike[str], *, pin_norms: bool = False) -> tuple[Config, Llama]:
    """`(config, params)` of a model directory; the leaves are lazy, in the dtype of the files.

    Only headers are read: names, shapes and file lengths are checked here, weights when `ya.shard` or
    `ya.materialize` asks for them, a layer at a time. Raises FileNotFoundError or ValueError naming the file and the
    tensor.

    pin_norms: as in `model.params`
    """
    root = Path(directory)
    found, file = settings(root, save_of(root))
    config = config_from_json(found[CONFIG], file)
    if GENERATION in found:
        config = dataclasses.replace(config, generation={**config.generation, "generation_config": found[GENERATION]})
    stored = scan_directory(root)
    if settings(root, save_of(root))[0] != found:  # the weights may be of the one model, or of the other
        raise ValueError(f"{root}: another model has been saved there while this one was opened; load it again")
    _check_names(root, file, config, stored)
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


def _check_names(root: Path, file: str, config: Config, stored: Mapping[str, Stored]) -> None:
    # the config may name any number of layers: nothing is made for each before the files are known to hold as many
    if config.layers > len(stored):
        raise ValueError(
            f"{file}: num_hidden_layers is {config.layers}, and the safetensors files hold {len(stored)} tensors in "
            f"all; one of the two is damaged, or of another model"
        )
    first, missing = None, 0
    for name in _names(config):
        if name not in stored:
            first, missing = first or name, missing + 1
    if first is not None:
        only_head = missing == 1 and first == "lm_head.weight"
        hint = "is the model tied (tie_word_embeddings)?" if only_head else "copy the model again"
        raise ValueError(f"{root}: no {_few(first, missing)} in any file, as config.json has it; {hint}")
    expected = set(_names(config))
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")  # some files have the embedding a second time
    if extra := sorted(stored.keys() - expected - ignored):
        few = _few(extra[0], len(extra))
        raise ValueError(f"{root}: {few} has no place in a Llama of this config.json; is it another model?")


def _few(name: str, count: int) -> str:
    name = name if name.isprintable() and len(name) < 200 else reprlib.repr(name)
    return name if count == 1 else f"{name} (and {count - 1} more)"


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
    `generation_config.json` where `load` found one: end tokens and the like stay what they were. Where it found none,
    that of an earlier model goes.

    params: plain or sharded. A sharded tree is gathered a layer at a time: every rank must call, rank 0 writes, and
        all return when the files are there
    dtype: what every tensor is converted to; None keeps that of `params`, the masters' of a sharded tree
    max_shard_bytes: no file passes this, unless a single tensor does; several files get an index

    An earlier model in `directory` stays until the new one is there as a whole: a kill leaves one of the two, as `load`
    reads it (`models/model_folder.py`). Raises ValueError where a tensor is not of the config's shape, OSError where
    rank 0 cannot write, on every rank of a sharded tree: here, too, one of the two models is left.
    """
    root, writes = Path(directory), not dist.is_initialized() or dist.get_rank() == 0
    abstract = model.params(config)
    writer = Writer(root, _names(config), max_shard_bytes=max_shard_bytes)
    failed: list[Exception] = []

    def on_rank_0(work: Callable[[Writer], object]) -> None:
        """The others are in the same collectives, and learn of a failure when all of them are through."""
        if writes and not failed:
            try:
                work(writer)
            except Exception as error:
                failed.append(error)

    def write(prefix: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != shapes.keys():
            raise ValueError(f"{prefix}*: expected the tensors {sorted(shapes)} of the config, got {sorted(weights)}")
        for key, shape in shapes.items():
            if weights[key].shape != shape:
                got = tuple(weights[key].shape)
                raise ValueError(f"{prefix}{key} has shape {got}, the config makes it {shape}; pass the one it has")
            tensor = weights[key] if dtype is None else weights[key].to(dtype)
            on_rank_0(functools.partial(Writer.add, name=prefix + key, tensor=tensor))

    with contextlib.ExitStack() as stack:
        on_rank_0(stack.enter_context)
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
        on_rank_0(lambda writer: writer.publish(_settings(config, writer)))
    if isinstance(params.layers, ya.Sharded) and dist.is_initialized():
        outcome = [failed]
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        failed = outcome[0]
    if failed:
        raise failed[0]


def _settings(config: Config, writer: Writer) -> Settings:
    assert writer.dtype is not None
    found = {CONFIG: config_to_json(config, writer.dtype)}
    if "generation_config" in config.generation:
        found[GENERATION] = config.generation["generation_config"]
    return found
