"""Models that exist: from a run of `python -m train`, or from a Hugging Face directory.

load(source)                                    # a model and its tokenizer, to be used
base = opened(folder)                           # one that others start from: a run's newest checkpoint, or a directory
state = base.trained(mesh)                      # its weights, to be looked at
state = base.begin(tx, mesh, precision, ...)    # step 0 of a run that goes on from them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train.config import ConfigError, Lora, Sharding, require
from train.config_json import from_json
from train.data import tokenizer as tokenizers
from train.data.conversations import Chat, chat_of
from train.data.tokenizer import Tokenizer
from train.running import run, setup
from train.settings import Config, Tuning
from yafsdp_fn import checkpoint


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a model. Neither a run nor a directory: the newest run in `runs`."""

    run: Path | None = None
    """The folder of a run."""
    model: Path | None = None
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    runs: Path = Path("runs")
    """The folder that runs are looked for in."""
    step: int | None = None
    """The checkpoint of the run. None given: the newest."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that a directory's weights are held and computed in; auto: as in the files. A run has its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. auto: cuda where there is one."""

    def __post_init__(self) -> None:
        require(self.run is None or self.model is None, "run and model: a model comes from one of the two")
        require(self.step is None or self.model is None, "step: checkpoints are of runs, not of a directory")
        own = self.model is None and self.compute != "auto"
        require(not own, f"compute is {self.compute}: a run has its own, and only a directory (--model) takes another")


class Loaded(NamedTuple):
    """A model, loaded.

    params: sharded over all ranks; ends: tokens that end a text; most: tokens of a text that the model was made
    for, or trained on; dtype: of the weights in compute
    """

    named: str
    model: Shape
    params: Any
    tokenizer: tokenizers.Tokenizer
    ends: frozenset[int]
    most: int
    dtype: torch.dtype
    device: str
    chat: Chat | None = None
    """The conversations of a model that was fine-tuned: it is asked, and answers."""

    def tokens(self, prompt: str) -> list[int]:
        """The tokens that the model goes on from."""
        if self.chat is None:
            return list(self.tokenizer.encode([prompt])[0].tolist())
        return list(self.chat.prompt([{"role": "user", "content": prompt}]).tolist())

    def text(self, prompt: Sequence[int], added: Sequence[int]) -> str:
        """The text that tokens add to a prompt: some tokenizers write a word otherwise where nothing is before it."""
        decode = self.tokenizer.decode
        if self.chat is not None:
            return "\n" + decode([token for token in added if token not in self.ends])
        return decode([*prompt, *added])[len(decode(prompt)) :]

    @property
    def vocab(self) -> int:
        """Tokens that the tokenizer knows; the model may have rows for more."""
        return min(self.tokenizer.vocab, self.model.vocab)


def load(source: Source) -> Loaded:
    """Loads a model on all ranks together. Raises ConfigError, or CheckpointError, where there is no such model."""
    mesh = ya.mesh(device=setup.own_device(source.device))
    return _of_run(source, mesh) if source.model is None else _of_directory(source.model, source, mesh)


def _of_run(source: Source, mesh: DeviceMesh) -> Loaded:
    folder = source.run or run.newest(source.runs, Config, Tuning)
    base = opened(folder)
    assert base.run is not None, "it has checkpoints"
    state = base.trained(mesh, source.step)
    return Loaded(
        f"{folder}, step {state.step}",
        base.model,
        state.params,
        base.tokenizer,
        base.ends,
        base.run.data.seq_len,
        setup.DTYPES[base.run.sharding.compute],
        mesh.device_type,
        base.chat,
    )


def _of_directory(folder: Path, source: Source, mesh: DeviceMesh) -> Loaded:
    try:
        model, lazy = models.hf.load(folder)
        stored = lazy.embed[next(iter(lazy.embed))].dtype
        by_itself = stored if stored == torch.bfloat16 else torch.float32
        dtype = by_itself if source.compute == "auto" else setup.DTYPES[source.compute]
        # frozen: held in the dtype of compute, without masters
        state = ya.shard(ya.frozen(lazy), mesh=mesh, precision=ya.Precision(compute=dtype))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--model: {error}") from error
    base = Opened(folder, str(folder), model, _tokenizer(folder), None, Lora())
    return Loaded(base.name, model, state.params, base.tokenizer, base.ends, model.max_length, dtype, mesh.device_type)


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""One of them is in a directory that has a tokenizer."""


def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in FILES):  # transformers would make an empty one
        raise ConfigError(f"{folder}: no tokenizer is there; copy the model's tokenizer files ({', '.join(FILES)})")
    return tokenizers.load(str(folder))


STORED = {"compute": None, "bfloat16": torch.bfloat16, "int8": torch.int8}

Adapt = Callable[[Any], Any]
"""A tree of parameters, tensors or lazy leaves -> the tree that is trained."""


def adapter(lora: Lora) -> Adapt:
    """The function from a tree to the tree that these settings train. Raises ConfigError, when called, where they
    choose no matrix."""

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
    """The name for people."""
    model: Shape
    tokenizer: Tokenizer
    run: Config | Tuning | None
    """The settings of the run; None for a Hugging Face directory."""
    lora: Lora
    """The run's own adapters."""

    @cached_property
    def chat(self) -> Chat | None:
        """The conversations of a run that was fine-tuned on some."""
        return chat_of(self.tokenizer) if isinstance(self.run, Tuning) else None

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text: the tokenizer's, the conversations', and those that the directory's settings name,
        as transformers reads them."""
        generation: Any = self.model.generation
        found = generation.get("generation_config", generation).get("eos_token_id")
        several = found if isinstance(found, list) else [] if found is None else [found]
        stops = frozenset([self.tokenizer.end]) if self.chat is None else self.chat.stops
        return stops.union(several)

    def begin(
        self,
        tx: ya.optim.GradientTransformation,
        mesh: DeviceMesh,
        precision: ya.Precision,
        lora: Lora,
        sharding: Sharding,
        seed: int,
    ) -> ya.ShardedState:
        """Its weights as the state of step 0 of a run that trains them so. Adapters of its own are merged first.

        seed: of new adapters, and of random numbers in steps
        """
        pin_norms = sharding.pin_norms
        how: Any = {"mesh": mesh, "precision": precision, "seed": seed}

        def adapted(tree: Any) -> Any:
            return adapter(lora)(setup.travelling(tree, sharding.wire))

        if self.run is None:
            _, lazy = models.hf.load(self.folder, pin_norms=pin_norms)
            return ya.shard(adapted(lazy), tx, **how)
        trained, tree = self.trained(mesh), models.of(self.model).params(self.model, pin_norms=pin_norms)
        if not (self.lora.rank or lora.rank):
            # from shards to shards
            return ya.shard(trained.params, tx, like=adapted(tree), **how)
        whole = ya.merge_lora(trained) if self.lora.rank else ya.unshard(trained.params)
        leaves: list[Any] = optree.tree_leaves(whole)
        marked = optree.tree_unflatten(optree.tree_structure(cast(Any, tree)), leaves)
        return ya.shard(adapted(marked), tx, **how)

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
        return checkpoint.load_params(self.folder / "checkpoints", empty, step=step, donate=True)


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
    return Opened(folder, config.model, model, tokenizers.load(run.tokenizer_name(config, folder)), config, Lora())


def _directory(folder: Path, tokenizer: str) -> Opened:
    try:
        model, _ = models.hf.load(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: neither a run nor a model that can be read: {error}") from error
    try:
        own = tokenizers.load(tokenizer) if tokenizer else _tokenizer(folder)
    except ConfigError as error:
        raise ConfigError(f"{error}; --tokenizer names another") if not tokenizer else error from None
    require(
        own.vocab <= model.vocab, f"{folder}: its vocabulary of {model.vocab} does not hold the tokenizer's {own.vocab}"
    )
    return Opened(folder, folder.name, model, own, None, Lora())
