"""A model and its tokenizer, to be used: from a run of `python -m train clm`, or from a Hugging Face directory."""

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
from train import run, setup
from train.config import ConfigError, from_json, require
from train.data import tokenizer as tokenizers
from yafsdp_fn import checkpoint


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

    def text(self, prompt: Sequence[int], added: Sequence[int]) -> str:
        """What tokens add to a prompt: some tokenizers write a word otherwise where nothing is before it."""
        decode = self.tokenizer.decode
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
    folder = source.run or run.newest(source.runs, configs.Config)
    trained = from_json(folder / "config.json", configs.Config)
    tokenizer = tokenizers.load(run.tokenizer_name(trained, folder))
    model = setup.model_config(trained.model, trained.vocab)
    params = models.of(model).params(model, pin_norms=trained.sharding.pin_norms)
    state = ya.init(params, ya.optim.identity(), mesh=mesh, precision=setup.precision(trained.sharding))
    state = checkpoint.load_params(folder / "checkpoints", state, step=source.step)
    dtype = setup.DTYPES[trained.sharding.compute]
    named, ends = f"{folder}, step {state.step}", frozenset([tokenizer.end])
    return Loaded(named, model, state.params, tokenizer, ends, trained.data.seq_len, dtype, mesh.device_type)


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
