"""Perplexity of text files: each is a document, and every token is predicted once, after those before it, as many as
the model was made for."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from train.config import ConfigError, require
from train.trained.likelihood import documents, likelihoods, windows
from train.trained.loaded import Loaded


class Perplexity(NamedTuple):
    """Of one text, or several together; nats are of all tokens."""

    name: str
    tokens: int
    nbytes: int
    nats: float

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        return math.exp(self.nats / self.nbytes)

    @property
    def bits_per_byte(self) -> float:
        """The same at any tokenizer."""
        return self.nats / self.nbytes / math.log(2)


def read(patterns: Sequence[str]) -> dict[str, str]:
    """Texts by the names of their files. Raises ConfigError where a pattern has none, or one is no text."""
    found: dict[str, str] = {}
    for pattern in patterns:
        files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        require(bool(files), f"--text {pattern}: no such file")
        for file in files:
            try:
                found[str(file)] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--text {file}: cannot be read as UTF-8 text: {error}") from error
            require(bool(found[str(file)]), f"--text {file}: it is empty")
    return found


def perplexities(loaded: Loaded, texts: dict[str, str], batch: int) -> list[Perplexity]:
    """Of each text, and of all of them last, where there are several."""
    rows = documents(loaded, list(texts.values()))
    cut = [list(windows(tokens, first, loaded.most)) for first, tokens in rows]
    found = iter(likelihoods(loaded, [part for parts in cut for part in parts], batch))
    each = [
        Perplexity(name, len(row), len(text.encode()), -sum(next(found).nats for _ in parts))
        for (name, text), (_, row), parts in zip(texts.items(), rows, cut, strict=True)
    ]
    if len(each) < 2:
        return each
    return [*each, Perplexity("all", *(sum(column) for column in list(zip(*each, strict=True))[1:]))]
