"""Loads and saves a family's tree of weights as Hugging Face's files hold it, layer by layer.

    config, params = load(family, directory)       # reads headers; the leaves are `ya.Lazy`
    state = ya.shard(params, tx, mesh=mesh)        # reads one layer at a time, each rank keeps its part
    save(family, directory, config, state.params)  # gathers one layer at a time, rank 0 writes

A leaf's Hugging Face name is its unit's prefix and its key, and files hold it unchanged, except the leaves of `forms`:
a stack is `torch.stack` of the files' tensors. Tokenizer files are not handled: copy them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import reprlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from models.files.config_json import special_tokens
from models.files.format import Format, as_it_is
from models.files.settings import ADAPTER, CONFIG, GENERATION, Settings, must_be_apart, settings
from models.files.tensor_writer import Writer
from models.parts.axes import NONE, Axes
from models.parts.config import Shape
from models.parts.tree import Parts
from yafsdp_fn.communication.groups import host_group
from yafsdp_fn.util.tensor_files import StoredTensor, scan_directory

C = TypeVar("C", bound=Shape)

HEAD = "lm_head.weight"


def load(
    family: Format[C], directory: str | os.PathLike[str], *, pin_norms: bool = False, axes: Axes = NONE
) -> tuple[C, Parts]:
    """Returns `(config, params)` of a model directory; the leaves are lazy, in the dtype of the files.

    Only headers are read: names, shapes and file lengths are checked here, weights are read when `ya.shard` or
    `ya.materialize` asks for them, a layer at a time. Raises FileNotFoundError or ValueError naming the file and the
    tensor. If `config.json` ties the head to the embedding, and the files hold another head, `config` is untied, and a
    warning says so, as in transformers: the two are compared by their values.

    pin_norms, axes: as in the family's `params`
    """
    root = Path(directory)
    found = settings(root)
    file = str(root / CONFIG)
    config = family.read_config(found[CONFIG], file)
    if GENERATION in found:
        special_tokens(found[GENERATION], str(root / GENERATION))
        config = dataclasses.replace(config, generation={**config.generation, "generation_config": found[GENERATION]})
    stored: dict[str, StoredTensor] = {}
    for name, tensor in scan_directory(root).items():
        if (known := family.known_as(name)) is not None:
            if known in stored:
                raise ValueError(
                    f"{root}: {_few(name, 1)} is {_few(stored[known].name, 1)} once more; delete one of them"
                )
            stored[known] = tensor
    if settings(root) != found:  # the weights may be of the one model, or of the other
        raise ValueError(f"{root}: another model has been saved there while this one was opened; load it again")
    config = _untied(family, file, config, stored)
    _check_names(family, root, file, config, stored)
    abstract, forms = family.params(config, pin_norms=pin_norms, **axes.options), family.forms(config)

    def leaf(prefix: str, key: str, param: ya.Param) -> ya.Lazy:
        form = forms.get(key, as_it_is(key))
        stack = "{layer}" in prefix
        prefixes = [prefix.format(layer=layer) for layer in range(config.layers)] if stack else [prefix]
        tensors = [[stored[at + name] for name in form.names] for at in prefixes]
        shape = param.shape[1:] if stack else param.shape
        shapes = [tuple(part.shape) for part in form.split(torch.empty(shape, device="meta"))]
        for row in tensors:
            for tensor, expected in zip(row, shapes, strict=True):
                _check_shape(tensor, expected)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for row in tensors for tensor in row))

        def read(layer: int | None) -> Tensor:
            rows = tensors if layer is None else [tensors[layer]]
            leaves = [form.join([tensor.read().to(dtype) for tensor in row]) for row in rows]
            return torch.stack(leaves) if stack and layer is None else leaves[0]

        return ya.Lazy.in_place_of(param, dtype, read)

    def part(prefix: str, tree: Any) -> Any:
        return optree.tree_map(lambda key, param: leaf(prefix, key, param), ya.params.leaf_names(tree), tree)

    return config, Parts(*map(part, family.prefix, abstract))


def _untied(family: Format[C], file: str, config: C, stored: dict[str, StoredTensor]) -> C:
    """Returns the config, untied if the files hold a head that is not the embedding."""
    name = family.prefix.embed + family.embedding
    head = stored.get(HEAD)
    if not config.tied or head is None:
        return config
    embedding = stored.setdefault(name, head)  # some files have the two under one name, and it may be this
    if torch.equal(head.read(), embedding.read()):
        return config
    warnings.warn(
        f"{file} ties the head to the embedding (tie_word_embeddings), but {head.file} holds another {HEAD} than "
        f"{name}: they are not tied. Set tie_word_embeddings to false, or delete the tensor that is not of this model",
        stacklevel=4,
    )
    return dataclasses.replace(config, tied=False)


def _check_names(family: Format[C], root: Path, file: str, config: C, stored: Mapping[str, StoredTensor]) -> None:
    # the config may name any number of layers: nothing is made for each before the files are known to hold as many
    if config.layers > len(stored):
        raise ValueError(
            f"{file}: a model of {config.layers} layers, and the safetensors files hold {len(stored)} tensors in "
            f"all; one of the two is damaged, or of another model"
        )
    first, missing = None, 0
    for name in family.names(config):
        if name not in stored:
            first = first or name
            missing = missing + 1
    ignored = {HEAD} if config.tied else set()  # some files have the embedding a second time
    extra = sorted(stored.keys() - set(family.names(config)) - ignored)
    few = _few(extra[0], len(extra)) if extra else ""
    if first is not None:
        only_head = missing == 1 and first == HEAD
        hint = "is the model tied (tie_word_embeddings)?" if only_head else "copy the model again"
        if extra:
            hint = f"they hold {few} instead: is it another model, or one in another form?"
        raise ValueError(f"{root}: no {_few(first, missing)} in any file, as config.json has it; {hint}")
    if extra:
        raise ValueError(f"{root}: {few} has no place in a {family.name} of this config.json; is it another model?")


def _few(name: str, count: int) -> str:
    name = name if name.isprintable() and len(name) < 200 else reprlib.repr(name)
    return name if count == 1 else f"{name} (and {count - 1} more)"


def _check_shape(found: StoredTensor, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ValueError(
            f"{found.file}: {found.name} has shape {found.shape}, config.json makes it {shape}; "
            f"the two are of different models"
        )


def save(
    family: Format[C],
    directory: str | os.PathLike[str],
    config: C,
    params: Parts,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `config.json` and safetensors that transformers and `load` read, replacing any model in `directory`, and
    `generation_config.json` if `load` found one: end tokens and the like stay unchanged. If it found none, that of an
    earlier model is removed.

    params: plain or sharded. A sharded tree is gathered a layer at a time: every rank must call, rank 0 writes, and
        all return when the files are there
    dtype: every tensor is converted to it; None keeps that of `params`, the masters' of a sharded tree
    max_shard_bytes: no file passes this, unless a single tensor does; several files get an index

    An earlier model in `directory` stays until the new one is complete: a kill leaves one of the two. Where
    `config.json` changes, a kill between the last renames leaves weights without one, no model (`settings.py`).

    Raises ValueError if a tensor is not of the config's shape, OSError if rank 0 cannot write, on every rank of a
    sharded tree: it leaves what a kill would.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype={dtype!r}: expected None, or a dtype of torch such as torch.bfloat16")
    root, writes = Path(directory), is_rank_0()
    abstract, forms, prefix = family.params(config), family.forms(config), family.prefix
    writer = Writer(root, family.names(config), max_shard_bytes=max_shard_bytes)
    failed: list[Exception] = []

    def on_rank_0(work: Callable[[Writer], object]) -> None:
        """Runs `work` on rank 0. The others are in the same collectives, and learn of a failure when all are
        through."""
        if writes and not failed:
            try:
                work(writer)
            except Exception as error:
                failed.append(error)

    def write(prefix: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Any]) -> None:
        if weights.keys() != shapes.keys():
            raise ValueError(f"{prefix}*: expected the tensors {sorted(shapes)} of the config, got {sorted(weights)}")
        for key, shape in shapes.items():
            if weights[key].shape != shape:
                got = tuple(weights[key].shape)
                raise ValueError(f"{prefix}{key} has shape {got}, the config makes it {shape}; pass the one it has")
            form = forms.get(key, as_it_is(key))
            weight = weights[key]
            whole = weight if isinstance(weight, Tensor) else weight.merged()
            for name, tensor in zip(form.names, form.split(whole), strict=True):
                tensor = tensor if dtype is None else tensor.to(dtype)
                on_rank_0(functools.partial(Writer.add, name=prefix + name, tensor=tensor))

    with contextlib.ExitStack() as stack:
        on_rank_0(lambda writer: must_be_apart(root, ADAPTER))
        on_rank_0(stack.enter_context)
        for at, leaves, unit in (
            (prefix.embed, abstract.embed, params.embed),
            (prefix.head, abstract.head, params.head),
        ):
            write(at, {key: leaf.shape for key, leaf in leaves.items()}, ya.params.without_markers(ya.unshard(unit)))
        count, shapes = itertools.count(), {key: leaf.shape[1:] for key, leaf in abstract.layers.tree.items()}

        def write_layer(weights: Mapping[str, Any]) -> None:
            if (layer := next(count)) < config.layers:
                write(prefix.layers.format(layer=layer), shapes, weights)

        ya.map_whole_layers(write_layer, params.layers)
        if (found := next(count)) != config.layers:
            raise ValueError(
                f"the params have {found} layers, the config has {config.layers}; pass the config they have"
            )
        on_rank_0(lambda writer: writer.publish(_settings(family, config, writer)))
    raise_on_all(params, failed)


def is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def raise_on_all(params: Parts, failed: list[Exception]) -> None:
    """Raises rank 0's error on every rank of a sharded tree."""
    if isinstance(params.layers, ya.Sharded) and dist.is_initialized():
        outcome = [failed]
        dist.broadcast_object_list(outcome, src=0, group=host_group(), device=torch.device("cpu"))
        failed = outcome[0]
    if failed:
        raise failed[0]


def _settings(family: Format[C], config: C, writer: Writer) -> Settings:
    assert writer.dtype is not None
    found = {CONFIG: family.write_config(config, writer.dtype)}
    if "generation_config" in config.generation:
        found[GENERATION] = config.generation["generation_config"]
    return found
