"""`python -m train sample`: continues prompts, one token at a time, with a model of a run or a Hugging Face directory.

The first text is shown as it grows, the others, which grow beside it, after it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

import torch.distributed as dist
import tyro
from rich.text import Text

from train.command_line import cli, say_apart
from train.config import ConfigError, require
from train.running.report import Terminal
from train.trained.generate import Drawing, generate
from train.trained.loaded import Loaded, Source, load
from yafsdp_fn import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Continue prompts with a model of `python -m train`, or of a Hugging Face directory. One of `sft` answers them."""

    source: tyro.conf.OmitArgPrefixes[Source] = dataclasses.field(default_factory=Source)
    prompt: tuple[str, ...] = ("def ",)
    """Texts to go on from."""
    length: int = 240
    """Tokens to add, at most: a text ends where the model ends it."""
    drawing: tyro.conf.OmitArgPrefixes[Drawing] = dataclasses.field(default_factory=Drawing)
    json: bool = False
    """A JSON object a line on stdout, and nothing else: prompt, text, tokens."""

    def __post_init__(self) -> None:
        require(bool(self.prompt) and all(self.prompt), "prompt is empty: a continuation needs something before it")
        require(self.length > 0, f"length is {self.length}: at least 1")


def main(argv: Sequence[str]) -> int:
    try:
        config = parsed(argv)
        show(config, load(config.source))
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def parsed(argv: Sequence[str]) -> Config:
    return cli(Config, argv, prog="python -m train sample")


def show(config: Config, loaded: Loaded) -> None:
    """Rank 0 writes."""
    console = Terminal(quiet=dist.get_rank() != 0)
    prompts = [loaded.tokens(prompt) for prompt in config.prompt]
    spelt = [written for written in loaded.tokenizer.special if any(written in prompt for prompt in config.prompt)]
    if spelt and loaded.chat is None and not console.quiet:
        say_apart(f"warning: a prompt spells {' '.join(spelt)}: it is read as text, as in documents, not as that token")
    if config.json:
        for text, prompt, added in zip(config.prompt, prompts, continued(config, loaded, prompts), strict=True):
            line = {"prompt": text, "text": loaded.text(prompt, added), "tokens": added}
            console.out(json.dumps(line, ensure_ascii=False), highlight=False)
        return
    console.rule(Text(loaded.named), align="left")
    console.print(Text(config.prompt[0], style="bold"), end="", soft_wrap=True)
    shown = 0

    def grown(added: list[int], ended: bool = False) -> None:
        """Shows what further tokens cannot change: all but a character that is cut."""
        nonlocal shown
        text = loaded.text(prompts[0], added)
        text = text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")
        console.print(Text(text[shown:]), end="", soft_wrap=True)
        console.file.flush()
        shown = max(shown, len(text))

    found = continued(config, loaded, prompts, grown)
    grown(found[0], ended=True)
    console.print()
    for text, prompt, added in list(zip(config.prompt, prompts, found, strict=True))[1:]:
        console.rule(style="dim")
        console.print(Text(text, style="bold") + Text(loaded.text(prompt, added)), soft_wrap=True)
    how = config.drawing
    words = f"temperature {how.temperature}, top {how.top_k or 'all'}, top p {how.top_p}, seed {how.seed}"
    console.rule(Text(words), align="left")
    if max(len(prompt) + len(added) for prompt, added in zip(prompts, found, strict=True)) > loaded.most:
        console.print(
            f"The model was trained on sequences of {loaded.most} tokens; text beyond that gets worse.", style="dim"
        )


def continued(
    config: Config,
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    grown: Callable[[list[int]], None] = lambda added: None,
) -> list[list[int]]:
    """The tokens added to each prompt; `grown` gets the first one's tokens whenever there is one more."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in generate(loaded, prompts, config.length, config.drawing):
        for text, token in zip(found, step, strict=True):
            if token is not None:
                text.append(token)
        if step[0] is not None:
            grown(found[0])
    return found
