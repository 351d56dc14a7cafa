"""Text to tokens and back: bytes, or any tokenizer that transformers reads.

The library is asked for only where a tokenizer is named: bytes need nothing.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from train.config import ConfigError
from train.data.rows import digest_of

BYTES = "bytes"
"""The name of the tokenizer that is none."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that end a text by custom, where a bare tokenizer.json does not say."""

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.json)")
"""Names of the Hugging Face hub: `name` or `owner/name`. Anything else is a path."""

NOWHERE = "there is no such file or folder"

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

    @property
    def unknown(self) -> int:
        """The token of what the tokenizer does not know; -1: it knows all."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """Tokens that stand for no text, by what they are written as."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, with what the tokenizer puts before it, without `end`."""
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
    unknown = -1
    special = types.MappingProxyType({chr(token): token for token in range(4)})
    """The end, and those that say who speaks in a conversation."""

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
        unknown = tokenizer.unk_token_id
        self.unknown: int = -1 if unknown in (None, end) else unknown  # GPT-2's is its end, and it knows all
        added = tokenizer.added_tokens_decoder.items()
        self.special = {str(written): token for token, written in added if written.special}

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
        special = sorted(map(str, self.inner.all_special_tokens))
        return digest_of(content, self.end, special, self.inner.chat_template)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(str(folder))


def load(named: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, a directory that has one, or a name that transformers knows; no code of theirs."""
    if named == BYTES:
        return Bytes()
    where = Path(named).expanduser()
    if not (where.exists() or NAME.fullmatch(named)):
        raise _refused(named, NOWHERE)
    transformers: Any = library("transformers", f"data.tokenizer {named}")
    offline = not where.exists() and not _hub_answers(named)
    try:
        if where.is_file():
            return Pretrained(transformers.PreTrainedTokenizerFast(tokenizer_file=str(where)), named)
        found = transformers.AutoTokenizer.from_pretrained(
            str(where) if where.exists() else named,
            trust_remote_code=False,  # by default it asks on the terminal whether to run what the folder brings along
            local_files_only=offline,
        )
        return Pretrained(found, named)
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: a damaged file is an Exception of the Rust side's, by its name
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise _refused(
            named, f"{NOWHERE}, the hub does not answer, and its cache has none" if offline else why
        ) from error


def _refused(named: str, why: str) -> ConfigError:
    return ConfigError(
        f"data.tokenizer: {named!r} cannot be read: {why}; expected bytes, a tokenizer.json, a directory with one, or "
        "a name of the Hugging Face hub"
    )


def _hub_answers(named: str) -> bool:
    """True if the hub says anything of a name. Asked once: the library asks six times for each file, with pauses."""
    hub: Any = library("huggingface_hub", f"data.tokenizer {named}")
    try:
        hub.model_info(named, timeout=10)
    except (hub.utils.HfHubHTTPError, ValueError):  # an answer, or no name: the library finds words for it
        return True
    except Exception:  # of the kinds of whichever library it speaks HTTP with
        return False
    return True


def library(name: str, who: str) -> Any:
    """Imports an optional library. Raises ConfigError that says who asked for it and how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{who} needs the library {name}: pip install 'yafsdp_fn[data]' ({error})") from None
