"""`python -m train tokenizer`: learns a byte-level BPE from the training text, into a folder for `--data.tokenizer`.

No text is beyond it: bytes that were never seen together stay bytes. Besides, it has tokens for the end of a document
and for the turns of a conversation, with the template that `python -m train sft` writes them by.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from train.command_line import cli
from train.config import ConfigError, Sources, require
from train.data.documents import Documents
from train.data.sources import documents
from train.data.tokenizer import Tokenizer, library, load

END, TURN, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (  # newlines of their own would be trimmed behind a tag
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWN = 200
"""Held-out documents that are encoded to say how well it does."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Learn a tokenizer from the training text of a run."""

    out: Path
    """The folder to write."""
    vocab: int = 4096
    """Tokens: all bytes, the special ones, and so many merges."""
    data: Sources = dataclasses.field(default_factory=Sources)

    def __post_init__(self) -> None:
        require(
            512 <= self.vocab <= 2**20, f"vocab is {self.vocab}: expected 512 to 2^20; the bytes themselves are 256"
        )


def main(argv: Sequence[str]) -> int:
    try:
        print(learn(cli(Config, argv, prog="python -m train tokenizer")))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def learn(config: Config) -> str:
    """Writes the folder; a sentence about it."""
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"out is {config.out}, which is there already: name another, or delete it")
    tokenizers: Any = library("tokenizers", "train tokenizer")
    transformers: Any = library("transformers", "train tokenizer")
    sources = documents(config.data)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocab,
        special_tokens=[END, TURN, STOP],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts([training for training, _ in sources]), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    fast.chat_template = TEMPLATE
    try:
        fast.save_pretrained(str(config.out))
    except OSError as error:
        raise ConfigError(f"out is {config.out}: it cannot be written: {error}") from None
    return f"{config.out}: {_facts(load(str(config.out)), [heldout for _, heldout in sources])}"


def _texts(sources: Sequence[Documents]) -> Iterator[str]:
    for each in sources:
        yield from each.texts()


def _facts(tokenizer: Tokenizer, heldout: Sequence[Documents]) -> str:
    texts = list(islice(_texts(heldout), SHOWN))
    count = sum(map(len, tokenizer.encode(texts)))
    nbytes = sum(len(text.encode(errors="replace")) for text in texts)
    said = f"{tokenizer.vocab:,} tokens"
    return f"{said}; {nbytes / count:.2f} bytes each in {len(texts)} held-out documents" if count else said
