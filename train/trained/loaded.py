"""A model and its tokenizer, to be used: from a run of `python -m train`, or from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

import models
import yafsdp_fn as ya
from models.parts.config import Shape
from train import config as configs
from train.config import ConfigError, require
from train.data import tokenizer as tokenizers
from train.data.chat import Chat, chat_of
from train.running import run, setup
from train.trained.opened import opened


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from. Neither a run nor a directory: the newest run in `runs`."""

    run: Path | None = None
    """The folder of a run."""
    model: Path | None = None
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    runs: Path = Path("runs")
    """Where runs are looked for."""
    step: int | None = None
    """Which checkpoint of the run. None given: the newest."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """What a directory's weights are held and computed in; auto: as in the files. A run has its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    def __post_init__(self) -> None:
        require(self.run is None or self.model is None, "run and model: a model comes from one of the two")
        require(self.step is None or self.model is None, "step: checkpoints are of runs, not of a directory")


class Loaded(NamedTuple):
    """params: sharded over all ranks; ends: tokens that end a text; most: tokens of a text that the model was made
    for, or trained on; dtype: of the weights in compute"""

    named: str
    model: Shape
    params: Any
    tokenizer: tokenizers.Tokenizer
    ends: frozenset[int]
    most: int
    dtype: torch.dtype
    device: str
    chat: Chat | None = None
    """Of a model that was fine-tuned: it is asked, and answers."""

    def tokens(self, prompt: str) -> list[int]:
        """What the model goes on from."""
        if self.chat is None:
            return list(self.tokenizer.encode([prompt])[0].tolist())
        return list(self.chat.prompt([{"role": "user", "content": prompt}]).tolist())

    def text(self, prompt: Sequence[int], added: Sequence[int]) -> str:
        """What tokens add to a prompt: some tokenizers write a word otherwise where nothing is before it."""
        decode = self.tokenizer.decode
        if self.chat is not None:
            return "\n" + decode([token for token in added if token not in self.ends])
        return decode([*prompt, *added])[len(decode(prompt)) :]

    @property
    def vocab(self) -> int:
        """Tokens that the tokenizer knows; the model may have rows for more."""
        return min(self.tokenizer.vocab, self.model.vocab)


def load(source: Source) -> Loaded:
    """On all ranks together. Raises ConfigError, or CheckpointError, where there is no such model."""
    mesh = ya.mesh(device=None if source.device == "auto" else source.device)
    return _of_run(source, mesh) if source.model is None else _of_directory(source.model, source, mesh)


def _of_run(source: Source, mesh: DeviceMesh) -> Loaded:
    folder = source.run or run.newest(source.runs, configs.Config, configs.Tuning)
    base = opened(folder)
    assert base.run is not None, "it has checkpoints"
    state = base.trained(mesh, source.step)
    chat = chat_of(base.tokenizer) if isinstance(base.run, configs.Tuning) else None
    return Loaded(
        f"{folder}, step {state.step}",
        base.model,
        state.params,
        base.tokenizer,
        frozenset([base.tokenizer.end]) if chat is None else chat.stops,
        base.run.data.seq_len,
        setup.DTYPES[base.run.sharding.compute],
        mesh.device_type,
        chat,
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
    tokenizer = _tokenizer(folder)
    ends = {tokenizer.end, *_ends(model.generation), *_ends(model.generation.get("generation_config", {}))}
    return Loaded(
        str(folder), model, state.params, tokenizer, frozenset(ends), model.max_length, dtype, mesh.device_type
    )


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""One of them is in a directory that has a tokenizer."""


def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in FILES):  # transformers would make an empty one
        raise ConfigError(f"{folder}: no tokenizer is there; copy the model's tokenizer files ({', '.join(FILES)})")
    return tokenizers.load(str(folder))


def _ends(settings: Any) -> Iterable[int]:
    found = settings.get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]
