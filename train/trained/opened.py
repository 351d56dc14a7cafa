"""Models that others start from: a run's newest checkpoint, or a Hugging Face directory.

base = opened(folder)
state = base.trained(mesh)                      # its weights, to be looked at
state = base.begin(tx, mesh, precision, lora)   # step 0 of a run that goes on from them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train.config import Config, ConfigError, Lora, Tuning, from_json, require
from train.data.tokenizer import Tokenizer, load
from train.running import run, setup
from yafsdp_fn import checkpoint

STORED = {"compute": None, "bfloat16": torch.bfloat16, "int8": torch.int8}

Adapt = Callable[[Any], Any]
"""A tree of parameters, tensors or lazy leaves -> the tree that is trained."""


def adapter(lora: Lora) -> Adapt:
    """What these settings make of a tree. Raises ConfigError, when called, where they choose no matrix."""

    def adapted(tree: Any) -> Any:
        ends = lora.where
        where = (lambda path, _: path.endswith(ends)) if ends else None
        try:
            return ya.lora(tree, lora.rank, where, alpha=lora.alpha or None, dtype=STORED[lora.stored])
        except ValueError as error:
            raise ConfigError(f"lora.where {' '.join(ends)}: {error}") from error

    return adapted if lora.rank else lambda tree: tree


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model with its weights somewhere on the disk."""

    folder: Path
    name: str
    """For people."""
    model: Shape
    tokenizer: Tokenizer
    run: Config | Tuning | None
    """The settings of the run; None for a Hugging Face directory."""
    lora: Lora
    """Of the run."""

    def begin(
        self,
        tx: ya.optim.GradientTransformation,
        mesh: DeviceMesh,
        precision: ya.Precision,
        lora: Lora,
        *,
        pin_norms: bool,
    ) -> ya.ShardedState:
        """Its weights as the state of step 0 of a run that trains them so. Adapters of its own are merged first."""
        adapted = adapter(lora)
        if self.run is None:
            _, lazy = models.hf.load(self.folder, pin_norms=pin_norms)
            return ya.shard(adapted(lazy), tx, mesh=mesh, precision=precision)
        trained, tree = self.trained(mesh), models.of(self.model).params(self.model, pin_norms=pin_norms)
        if not (self.lora.rank or lora.rank):
            return ya.shard(trained.params, tx, like=tree, precision=precision)  # from shards to shards
        whole = ya.merge_lora(trained) if self.lora.rank else ya.unshard(trained.params)
        leaves: list[Any] = optree.tree_leaves(whole)
        marked = optree.tree_unflatten(optree.tree_structure(cast(Any, tree)), leaves)
        return ya.shard(adapted(marked), tx, mesh=mesh, precision=precision)

    def trained(self, mesh: DeviceMesh, step: int | None = None) -> ya.ShardedState:
        """Its weights as they are, adapters apart, with no optimizer; of a run in its precision.

        step: of a run's checkpoint; None: the newest
        """
        tx = ya.optim.identity()
        if self.run is None:
            return ya.shard(models.hf.load(self.folder)[1], tx, mesh=mesh)
        precision = setup.precision(self.run.sharding)
        tree = adapter(self.lora)(models.of(self.model).params(self.model, pin_norms=self.run.sharding.pin_norms))
        empty = ya.init(tree, tx, mesh=mesh, precision=precision)
        return checkpoint.load_params(self.folder / "checkpoints", empty, step=step)


def opened(folder: Path, tokenizer: str = "") -> Opened:
    """The model in `folder`. Raises ConfigError where there is none.

    tokenizer: of a Hugging Face directory, in place of its own
    """
    require(folder.is_dir(), f"{folder} is not a folder: expected that of a run, or a Hugging Face directory")
    if not run.is_run(folder):
        return _directory(folder, tokenizer)
    require(checkpoint.latest(folder / "checkpoints") is not None, f"{folder} holds no complete checkpoint yet")
    require(not tokenizer, f"tokenizer is {tokenizer!r}, and {folder} is a run: it has its own")
    if run.command_of(folder / "config.json") == Tuning.COMMAND:
        tuning = from_json(folder / "config.json", Tuning)
        base = opened(Path(tuning.start), tuning.tokenizer)
        return dataclasses.replace(base, folder=folder, run=tuning, lora=tuning.lora)
    config = from_json(folder / "config.json", Config)
    model = setup.model_config(config.model, config.vocab)
    return Opened(folder, config.model, model, load(run.tokenizer_name(config, folder)), config, Lora())


def _directory(folder: Path, tokenizer: str) -> Opened:
    try:
        model, _ = models.hf.load(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: neither a run nor a model that can be read: {error}") from error
    try:
        own = load(tokenizer or str(folder))
    except ConfigError as error:
        raise ConfigError(f"{error}; --tokenizer names another") if not tokenizer else error from None
    require(
        own.vocab <= model.vocab, f"{folder}: its vocabulary of {model.vocab} does not hold the tokenizer's {own.vocab}"
    )
    return Opened(folder, folder.name, model, own, None, Lora())
