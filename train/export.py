"""`python -m train export`: the newest checkpoint of a run as a Hugging Face directory, adapters merged.

Rank 0 writes, a layer at a time; under `launch --ranks N` no rank holds more than its part and a layer.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch.distributed as dist

import models
import yafsdp_fn as ya
from train.command_line import cli
from train.config import ConfigError
from train.running import run, setup
from train.settings import Config as Pretraining
from train.settings import Tuning
from train.trained.loaded import FILES, opened
from yafsdp_fn import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Write what a run has learnt as a directory for transformers."""

    out: Path
    """The directory. A model that is there already is replaced."""
    run: Path | None = None
    """The folder of the run. None given: the newest one in `runs`."""
    runs: Path = Path("runs")
    """The folder that runs are looked for in."""
    step: int | None = None
    """The checkpoint. None given: the newest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights on the disk."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device. auto: cuda where there is one."""


def main(argv: Sequence[str]) -> int:
    try:
        said = write(cli(Config, argv, prog="python -m train export"))
    except (ConfigError, checkpoint.CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if dist.get_rank() == 0:
        print(said)
    dist.destroy_process_group()
    return 0


TOKENIZERS = (*FILES, "chat_template.jinja", "merges.txt", "special_tokens_map.json", "added_tokens.json")
"""Files of a tokenizer."""


def write(config: Config) -> str:
    """Writes the directory; a sentence about it. Every rank calls it."""
    if (config.out / "checkpoints").is_dir():
        raise ConfigError(
            f"--out {config.out} is the folder of a run: the model's config.json would replace that of the run, which "
            "nothing could go on from; name another"
        )
    base = opened(config.run or run.newest(config.runs, Pretraining, Tuning))
    mesh = ya.mesh(device=setup.own_device(config.device))
    state = base.trained(mesh, config.step)
    settings = base.model.generation
    ends = {"eos_token_id": sorted(base.ends)}
    generation = {**settings, **ends, "generation_config": {**settings.get("generation_config", {}), **ends}}
    model = dataclasses.replace(base.model, generation=generation)
    models.hf.save(config.out, model, state.params, dtype=setup.DTYPES[config.dtype])
    if dist.get_rank() == 0:
        for name in TOKENIZERS:  # of a model that was there: bytes write none in their place
            (config.out / name).unlink(missing_ok=True)
        base.tokenizer.save(config.out)
    return f"{config.out}: {base.model.num_parameters / 1e6:.2f}M parameters of {base.folder}, step {state.step}"
