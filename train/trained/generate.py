"""Texts that go on, token by token, several at once: what a model draws after each prompt.

scores = decode(prompts, padded in front to end together)       # fills the key/value cache, in place
repeat: tokens = one draw per text; scores = decode(tokens at the next position)

A text does not depend on those beside it: padding is seen by nothing, and each draws with a generator of its own. Up to
the last bits of scores: products of other shapes round otherwise, which shows where two tokens are as likely as that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import models
from train.config import require
from train.trained.loaded import Loaded

PART = 512
"""Tokens of prompts that are read at once, whose scores are there together."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Settings of how the next token is drawn."""

    temperature: float = 0.5
    """Scores are divided by it before drawing; 0 takes the best token every time."""
    top_k: int = 40
    """Draw among the so many best tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest best tokens that have this probability together."""
    seed: int = 0
    """Seed of the drawing, for each text."""

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), f"temperature is {self.temperature}: expected at least 0")
        require(self.top_k >= 0, f"top_k is {self.top_k}: expected a number of tokens, or 0 for all")
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}: a probability above 0, 1 at most")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}: expected 0 to 2^63 - 1")


def draw(scores: Tensor, how: Drawing, generator: torch.Generator) -> int:
    """One token by its scores [V]."""
    if how.temperature == 0:
        return int(scores.argmax())
    best, tokens = scores.double().topk(min(how.top_k or len(scores), len(scores)))
    chances = (best / how.temperature).softmax(-1)
    chances = chances[: 1 + int((chances.cumsum(-1) < how.top_p).sum())]  # the one that reaches top_p belongs to them
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])


def generate(loaded: Loaded, prompts: Sequence[Sequence[int]], length: int, how: Drawing) -> Iterator[list[int | None]]:
    """Yields at each position the token of each text, None after its end, until all have ended or `length` tokens were
    drawn.

    Ranks of a sharded model draw together, and all take what rank 0 drew. Raises ConfigError for an empty prompt, and
    where a prompt and `length` pass the positions of the model.
    """
    model = loaded.model
    device = loaded.device
    longest = max(map(len, prompts))
    family = models.of(model)
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} is empty: a continuation needs at least one token before it")
        room = (model.longest or len(prompt) + length) - len(prompt)
        require(
            room >= length, f"prompt {number}: {len(prompt)} tokens and {length} more pass {model.longest} positions"
        )
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    rows = [pad(torch.tensor(prompt, dtype=torch.long), (longest - len(prompt), 0)) for prompt in prompts]
    tokens = torch.stack(rows).to(device)
    position = 0
    several = {"padding": padding} if len({len(prompt) for prompt in prompts}) > 1 else {}
    cache = family.init_cache(model, len(prompts), longest + length, loaded.dtype, device)
    generators = [torch.Generator().manual_seed(how.seed) for _ in prompts]
    ended = [False] * len(prompts)
    for _ in range(length):
        for part in tokens.split(PART, 1):  # type: ignore[no-untyped-call]
            scores = family.decode(model, loaded.params, part, cache, position, **several)
            position += part.shape[1]
        found = scores[:, -1, : loaded.vocab].float().cpu()
        drawn = [
            0 if over else draw(row, how, generator)
            for row, generator, over in zip(found, generators, ended, strict=True)
        ]
        tokens = torch.tensor(drawn, device=device)[:, None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(tokens, 0)
            drawn = tokens[:, 0].tolist()
        ended = [over or token in loaded.ends for over, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, drawn, strict=True)]
