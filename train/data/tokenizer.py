"""Text to tokens and back: bytes, or any tokenizer that transformers reads.

The library is asked for only where a tokenizer is named: bytes need nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from train.config import ConfigError

BYTES = "bytes"
"""The name of the tokenizer that is none."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""What ends a text by custom, where a bare tokenizer.json does not say."""

Tokens = Any
"""A numpy array [S] of integers."""


class Tokenizer(Protocol):
    @property
    def vocab(self) -> int:
        """Tokens are below it."""
        ...

    @property
    def end(self) -> int:
        """The token after a document."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Of each text, with what the tokenizer puts before it, without `end`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def fingerprint(self) -> str: ...

    def save(self, folder: Path) -> None:
        """Writes what `load` reads."""
        ...


class Bytes:
    """A token a UTF-8 byte; documents end with a zero, which text does not have."""

    vocab = 256
    end = 0

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 (a cut character, a young model) become replacement characters."""
        return bytes(tokens).decode(errors="replace")

    def fingerprint(self) -> str:
        return BYTES

    def save(self, folder: Path) -> None:
        """Nothing: the name is enough."""


class Pretrained:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, named: str) -> None:
        end = tokenizer.eos_token_id
        if end is None:
            tokens = tokenizer.get_vocab()
            end = next((tokens[each] for each in ENDS if each in tokens), None)
        if end is None:
            raise ConfigError(
                f"data.tokenizer: {named} has no token that ends a text: give its folder a tokenizer_config.json with "
                f'an "eos_token"; expected that, or one of {", ".join(ENDS)} among its tokens'
            )
        self.inner = tokenizer
        self.end: int = end
        self.vocab: int = max(tokenizer.get_vocab().values()) + 1

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:  # the library raises an IndexError
            return []
        # split: a document that spells a special token does not become one
        ids = self.inner(list(texts), verbose=False, return_attention_mask=False, split_special_tokens=True)[
            "input_ids"
        ]
        arrays = [np.asarray(each, np.int32) for each in ids]
        return [each[:-1] if len(each) and each[-1] == self.end else each for each in arrays]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.inner.decode(list(tokens))
        return text

    def fingerprint(self) -> str:
        backend = getattr(self.inner, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(self.inner.get_vocab(), sort_keys=True)
        facts = (content, self.end, sorted(map(str, self.inner.all_special_tokens)), self.inner.chat_template)
        return hashlib.blake2b(repr(facts).encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(str(folder))


def load(named: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, a directory that has one, or a name that transformers knows."""
    if named == BYTES:
        return Bytes()
    transformers: Any = library("transformers", f"data.tokenizer {named}")
    try:
        if Path(named).expanduser().is_file():
            file = str(Path(named).expanduser())
            return Pretrained(transformers.PreTrainedTokenizerFast(tokenizer_file=file), named)
        where = Path(named).expanduser()
        return Pretrained(transformers.AutoTokenizer.from_pretrained(str(where) if where.is_dir() else named), named)
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: a damaged file is an Exception of the Rust side's, by its name
        raise ConfigError(
            f"data.tokenizer: {named!r} cannot be read: {str(error).splitlines()[0]}; expected bytes, a "
            "tokenizer.json, a directory with one, or a name of the Hugging Face hub"
        ) from error


def library(name: str, who: str) -> Any:
    """An optional library, or a ConfigError that says who asked for it and how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{who} needs the library {name}: pip install 'yafsdp_fn[data]' ({error})") from None
