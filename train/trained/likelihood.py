"""Log-probabilities that a model gives to parts of texts, each after its context.

parts are cut into batches, padded behind; ranks take batches in turn; every rank gets all that was found
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import models
from train.config import require
from train.running.together import talking
from train.trained.loaded import Loaded

Tokens = Sequence[int]


class Part(NamedTuple):
    """`targets` are scored after `context`, which is not empty."""

    context: Tokens
    targets: Tokens


class Likelihood(NamedTuple):
    """The likelihood of one part.

    nats: the sum of log-probabilities, 0 at most; best: whether each target was the likeliest token there
    """

    nats: float
    best: bool


def likelihoods(loaded: Loaded, parts: Sequence[Part], batch: int) -> list[Likelihood]:
    """The likelihood of each part. Every rank must call with the same parts, and gets all of it.

    batch: parts that are computed at once. Of a context that does not fit into what the model was made for with its
    targets, the end counts. Raises ConfigError where there is no context, or targets alone do not fit.
    """
    for part in parts:
        require(len(part.context) > 0 and len(part.targets) > 0, "a part without context, or without targets")
        most = loaded.most
        got = len(part.targets)
        require(got <= most, f"{got} tokens are to be scored at once: {loaded.named} was made for {most}")
    lengths = [len(part.context) + len(part.targets) for part in parts]
    order = sorted(range(len(parts)), key=lambda index: -lengths[index])
    batches = [order[at : at + batch] for at in range(0, len(order), batch)]
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    mine: dict[int, Likelihood] = {}
    for at in range(0, len(batches), ranks):  # all ranks compute as often: their weights come from each other
        indices = batches[min(at + rank, len(batches) - 1)]
        mine |= zip(indices, _of_batch(loaded, [parts[index] for index in indices]), strict=True)
    found: list[dict[int, Likelihood]] = [mine] * ranks
    if ranks > 1:
        with talking("gathering likelihoods"):
            dist.all_gather_object(found, mine)
    every = {index: each for of_rank in found for index, each in of_rank.items()}
    return [every[index] for index in range(len(parts))]


def _of_batch(loaded: Loaded, parts: Sequence[Part]) -> Iterator[Likelihood]:
    rows = [[*part.context, *part.targets][-(loaded.most + 1) :] for part in parts]
    longest = max(map(len, rows)) - 1
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full((len(rows), longest), -100)
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        end = len(row) - 1
        count = len(part.targets)
        tokens[index, :end] = torch.tensor(row[:-1])
        targets[index, end - count : end] = torch.tensor(row[-count:])
    family: Any = models.of(loaded.model)
    found = family.score(loaded.model, loaded.params, tokens.to(loaded.device), targets.to(loaded.device))
    sums = found.log_probability.double().sum(1).tolist()
    best = found.best.all(1).tolist()
    return (Likelihood(*each) for each in zip(sums, best, strict=True))


def of_texts(loaded: Loaded, texts: Sequence[str], batch: int) -> list[tuple[int, float]]:
    """Returns the number of each text's tokens, and the sum of their log-probabilities. The token before a text is
    given, not predicted: the one that the tokenizer puts there, or else the one that ends a text. All ranks together,
    as `likelihoods`."""
    before, *encoded = (list(map(int, each)) for each in loaded.tokenizer.encode(["", *texts]))
    rows = [row[len(before) :] for row in encoded]
    first = before[-1] if before else loaded.tokenizer.end
    cut = [list(windows(row, first, loaded.most)) for row in rows]
    found = iter(likelihoods(loaded, [part for parts in cut for part in parts], batch))
    return [(len(row), sum(next(found).nats for _ in parts)) for row, parts in zip(rows, cut, strict=True)]


def windows(tokens: Tokens, first: int, most: int) -> Iterator[Part]:
    """Parts whose targets are all of `tokens`, each once: of `most` targets but the last, after as much of what is
    before as fits. first: stands before the text"""
    for at in range(0, len(tokens), most):
        targets = tokens[at : at + most]
        room = most + 1 - len(targets)  # the context of a last, shorter part reaches back
        context = tokens[max(0, at - room) : at]
        yield Part([first, *context][-room:] if at < room else context, targets)
