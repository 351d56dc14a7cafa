"""Conversations to tokens, and which of them are the assistant's: the ones that are learnt.

    messages   [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "Does it."}]
    bytes      2 d e f ... : 0 3 D o e s ... . 0                    1, 2, 3: the system, the user, the assistant speaks
    learnt                       ^^^^^^^^^^^^^                      what it says, and that it ends

A tokenizer of transformers has a template of its own. Where that marks what the assistant says, by {% generation %},
its marks are taken; where not, it is what each of the assistant's turns adds to the conversation before it, if the
template only ever adds. One that changes earlier turns is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from train.config import ConfigError
from train.data.tokenizer import Bytes, Pretrained, Tokenizer, Tokens

Messages = Sequence[Mapping[str, str]]

ROLES = {"system": 1, "user": 2, "assistant": 3}
"""In bytes, which text does not have."""

ASSISTANT = "assistant"


class Encoded(NamedTuple):
    tokens: Tokens
    """[S] integers"""
    learnt: Tokens
    """[S] bool: whether the assistant says it"""


class Chat(Protocol):
    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end what the assistant says."""
        ...

    def encode(self, messages: Messages) -> Encoded: ...

    def prompt(self, messages: Messages) -> Tokens:
        """[S]: the conversation so far, and that the assistant speaks next."""
        ...

    def fingerprint(self) -> str: ...


def checked(value: object, where: str) -> Messages:
    """Messages as datasets have them. Raises ConfigError where they are none."""
    parts = value if isinstance(value, list) else []
    messages = [
        {"role": part["role"], "content": part["content"]}
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("role"), str) and isinstance(part.get("content"), str)
    ]
    if not messages or len(messages) < len(parts):
        raise ConfigError(
            f'{where}: {json.dumps(value, default=str):.80}: expected [{{"role": ..., "content": ...}}, ...]'
        )
    return messages


def chat_of(tokenizer: Tokenizer) -> Chat:
    """The conversations that a tokenizer writes. Raises ConfigError where it has no template."""
    if isinstance(tokenizer, Bytes):
        return ByteChat()
    assert isinstance(tokenizer, Pretrained), "there are no others"
    return TemplateChat(tokenizer)


class ByteChat:
    stops = frozenset({Bytes.end})

    def encode(self, messages: Messages) -> Encoded:
        parts, learnt = [], []
        for message in messages:
            part = self._turn(message["role"]) + message["content"].encode(errors="replace") + bytes([Bytes.end])
            parts.append(part)
            learnt.append(np.full(len(part), message["role"] == ASSISTANT))
            learnt[-1][0] = False  # that it speaks is not its own to say
        return Encoded(np.frombuffer(b"".join(parts), np.uint8), np.concatenate(learnt))

    def prompt(self, messages: Messages) -> Tokens:
        return np.append(self.encode(messages).tokens, np.uint8(ROLES[ASSISTANT]))

    def fingerprint(self) -> str:
        return repr(ROLES)

    def _turn(self, role: str) -> bytes:
        if role not in ROLES:
            raise ConfigError(f"role {role!r}: conversations in bytes have {', '.join(ROLES)}")
        return bytes([ROLES[role]])


class TemplateChat:
    def __init__(self, tokenizer: Pretrained) -> None:
        self._inner = tokenizer.inner
        if not self._inner.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: conversations cannot be written in it. Give its folder a "
                "chat_template.jinja, with {% generation %} around what the assistant says"
            )
        self._template = str(self._inner.chat_template)
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
        said = self.encode([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}])
        special = {token for token, added in self._inner.added_tokens_decoder.items() if added.special}
        self.stops = frozenset({tokenizer.end, *special.intersection(said.tokens[said.learnt].tolist())})

    def encode(self, messages: Messages) -> Encoded:
        if self._marks:
            found = self._apply(messages, return_assistant_tokens_mask=True)
            return Encoded(_array(found["input_ids"]), np.asarray(found["assistant_masks"], bool))
        tokens = _array(self._apply(messages)["input_ids"])
        learnt = np.zeros(len(tokens), bool)
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = _array(self._apply(messages[:index], add_generation_prompt=True)["input_ids"])
                behind = _array(self._apply(messages[: index + 1])["input_ids"])
                if not (_begins(behind, before) and _begins(tokens, behind)):
                    raise ConfigError(
                        f"the chat template writes what comes before turn {index + 1} in another way once that is "
                        "there, so what the assistant says cannot be told apart: put {% generation %} and "
                        "{% endgeneration %} around it in the template"
                    )
                learnt[len(before) : len(behind)] = True
        return Encoded(tokens, learnt)

    def prompt(self, messages: Messages) -> Tokens:
        return _array(self._apply(messages, add_generation_prompt=True)["input_ids"])

    def fingerprint(self) -> str:
        return self._template

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=True, return_dict=True, **options
            )
        except Exception as error:  # of jinja's and of the template's own
            raise ConfigError(f"the chat template refuses {str(messages)[:80]}: {error}") from error


def _array(tokens: Any) -> Tokens:
    return np.asarray(tokens, np.int32)


def _begins(tokens: Tokens, start: Tokens) -> bool:
    return len(start) <= len(tokens) and bool((tokens[: len(start)] == start).all())
