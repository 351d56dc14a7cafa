"""`python -m train sample`: continues a prompt from a run's checkpoint, one token at a time.

scores = decode(prompt at position 0)                       # fills the key/value cache, in place
repeat: next = draw(scores / temperature, among the top k); scores = decode(next at the next position)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.text import Text
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from train import config as configs
from train import run, setup
from train.config import ConfigError, from_json, require
from train.data.tokenizer import Tokenizer, load
from yafsdp_fn import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Continue a prompt from a checkpoint of `python -m train clm`."""

    run: Path | None = None
    """The folder of the run. None given: the newest one in `runs`."""
    runs: Path = Path("runs")
    """Where runs are looked for."""
    step: int | None = None
    """Which checkpoint. None given: the newest."""
    prompt: str = "def "
    """What the text begins with."""
    length: int = 240
    """Tokens to add, at most: a sample ends where the model ends the document."""
    temperature: float = 0.5
    """Scores are divided by it before drawing; 0 takes the best token every time."""
    top_k: int = 40
    """Draw among the so many best tokens."""
    seed: int = 0
    """Of the drawing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    def __post_init__(self) -> None:
        require(bool(self.prompt), "prompt is empty: a continuation needs at least one token before it")
        require(self.length > 0, f"length is {self.length}: at least 1")
        require(self.temperature >= 0, f"temperature is {self.temperature}, negative")
        require(self.top_k > 0, f"top_k is {self.top_k}: at least the best token must remain")


def main(argv: Sequence[str]) -> int:
    try:
        show(tyro.cli(Config, args=argv, prog="python -m train sample"))
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def show(config: Config) -> None:
    folder = config.run or run.newest(config.runs, configs.Config)
    trained = from_json(folder / "config.json", configs.Config)
    tokenizer = load(run.tokenizer_name(trained, folder))
    model = setup.model_config(trained.model, trained.vocab)
    mesh = ya.mesh(device=None if config.device == "auto" else config.device)
    if mesh.size() > 1:
        raise ConfigError(f"sample runs in one process, not in {mesh.size()}: start it without torchrun")
    params = llama.params(model, pin_norms=trained.sharding.pin_norms)
    state = ya.init(params, ya.optim.identity(), mesh=mesh, precision=setup.precision(trained.sharding))
    state = checkpoint.load_params(folder / "checkpoints", state, step=config.step)

    tokens, dtype = (
        torch.from_numpy(tokenizer.encode([config.prompt])[0].astype("int64")),
        setup.DTYPES[trained.sharding.compute],
    )
    console = Console()
    console.rule(Text(f"{folder}, step {state.step}"), align="left")
    prompt = tokens.to(state.mesh.device_type)
    added = list(continuation(model, state.params, prompt, tokenizer, config, dtype))
    text = tokenizer.decode([*tokens.tolist(), *added])
    console.print(Text(config.prompt, style="bold") + Text(text[len(config.prompt) :]), soft_wrap=True)
    how = f"temperature {config.temperature}, top {config.top_k}, seed {config.seed}"
    console.rule(Text(how), align="left")
    if len(tokens) + len(added) > (trained_on := trained.data.seq_len):
        console.print(
            f"The model was trained on sequences of {trained_on} tokens; text beyond that gets worse.", style="dim"
        )


def continuation(
    model: llama.Config, params: Any, prompt: Tensor, tokenizer: Tokenizer, config: Config, dtype: torch.dtype
) -> Iterator[int]:
    """The tokens after `prompt` [S], until `config.length` or the end of the document."""
    generator = torch.Generator().manual_seed(config.seed)
    tokens, position = prompt[None], 0
    cache = llama.init_cache(model, 1, len(prompt) + config.length, dtype, prompt.device)
    for _ in range(config.length):
        scores = llama.decode(model, params, tokens, cache, position)[0, -1, : tokenizer.vocab].float().cpu()
        position += tokens.shape[1]
        token = draw(scores, config.temperature, config.top_k, generator)
        if token == tokenizer.end:
            return
        yield token
        tokens = torch.tensor([[token]], device=prompt.device)


def draw(scores: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token by its scores [V]."""
    best, index = scores.topk(min(top_k, len(scores)))
    if temperature == 0:
        return int(index[0])
    return int(index[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])
