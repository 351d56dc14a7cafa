"""Conversations packed into rows, and the rows of what the assistant says.

    a row    user ... assistant ... | user ... assistant ... | padding
    targets  -100 ... the next one  | -100 ... the next one  | -100          documents 0 ..., 1 ..., 2

A conversation goes into the first of `OPEN` unfilled rows that has room for it. One that is longer than a row is cut
into pieces that are packed in the same way; S = 4, its tokens a to j:

    piece  a b c d   targets b c d e        Each token but the first is a target once. A piece is a document of its own:
           e f g h           f g h i        attention and positions begin anew in it, so that what it learns is learnt
           i                 j              without what was said before it. How much that is, is counted.

A conversation, or a piece, in which nothing is learnt is left out and counted. An epoch has each of the others once.
Which of them share a row does not change; the order of rows does, in each epoch.

Conversations to tokens, and which of them are the assistant's: the ones that are learnt (`Chat`).

    messages   [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "Does it."}]
    bytes      2 d e f ... : 0 3 D o e s ... . 0                    1, 2, 3: the system, the user, the assistant speaks
    learnt                       ^^^^^^^^^^^^^                      what it says, and that it ends

A tokenizer of transformers has a template of its own. Where that marks what the assistant says, by {% generation %},
its marks are taken; where not, it is what each of the assistant's turns adds to the conversation before it, if the
template only ever adds. One that changes earlier turns is refused.

A template is a program that comes with the tokenizer. It reaches no files and nothing of Python's (jinja2's sandbox),
and `LIMIT` ends its loops; how much memory it fills is not limited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from train.config import ConfigError
from train.data.documents import Messages
from train.data.rows import Indexed, Row, digest_of
from train.data.store import Notes, Store, kept, told
from train.data.tokenizer import Bytes, Pretrained, Tokenizer, Tokens
from yafsdp_fn.util.words import counted

ROLES = {"system": 1, "user": 2, "assistant": 3}
"""Roles in bytes, which text does not have."""

ASSISTANT = "assistant"

LIMIT = 20.0
"""Seconds of the processor's time that a template has for a conversation."""


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


def chat_of(tokenizer: Tokenizer) -> Chat:
    """The conversations that a tokenizer writes. Raises ConfigError where it has no template."""
    if isinstance(tokenizer, Bytes):
        return ByteChat()
    assert isinstance(tokenizer, Pretrained), "there are no others"
    return TemplateChat(tokenizer)


class ByteChat:
    stops = frozenset({Bytes.end})

    def encode(self, messages: Messages) -> Encoded:
        parts = []
        learnt = []
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
        special = {*tokenizer.special.values()}

        def silent(token: int) -> bool:
            return token in special or not tokenizer.decode([token]).strip()

        # behind the last word: by some templates the assistant says <|im_start|>assistant before its first one
        behind = takewhile(silent, reversed(said.tokens[said.learnt].tolist()))
        self.stops = frozenset({tokenizer.end, *special.intersection(behind)})

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
            with _at_most(LIMIT):
                return self._inner.apply_chat_template(
                    [dict(message) for message in messages], tokenize=True, return_dict=True, **options
                )
        except Exception as error:  # of jinja's and of the template's own
            raise ConfigError(f"the chat template refuses {str(messages)[:80]}: {error}") from error


def _array(tokens: Any) -> Tokens:
    return np.asarray(tokens, np.int32)


def _begins(tokens: Tokens, start: Tokens) -> bool:
    return len(start) <= len(tokens) and bool((tokens[: len(start)] == start).all())


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside where that runs for longer, and again while it goes on: jinja2 drops errors here and
    there. Only in the main thread, where Python handles signals; seconds are the process's own, not those it waits or
    is stopped for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it runs for more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Source(Protocol):
    @property
    def label(self) -> str: ...

    def key(self) -> str:
        """Changes with the conversations."""
        ...

    def conversations(self) -> Iterator[Messages]: ...


@dataclasses.dataclass(frozen=True)
class Conversations(Indexed):
    """The rows of stored conversations. Neither tokens nor rows are held in memory."""

    name: str
    store: Store
    """Whole conversations: tokens as they are, those that the assistant says as -1 - token."""
    rows: Store
    """The pieces of each row, as pairs: where in the store's tokens each begins and ends."""
    seq_len: int

    @staticmethod
    def of(
        name: str, sources: Sequence[Source], tokenizer: Tokenizer, chat: Chat, seq_len: int, cache: Path
    ) -> Conversations:
        """Returns those of one source after the other. Raises ConfigError, naming the conversation, where one cannot be
        written."""
        label, special = "; ".join(source.label for source in sources), list(tokenizer.special)

        def arrays(notes: Notes) -> Iterator[Tokens]:
            for number, messages in enumerate((each for source in sources for each in source.conversations()), 1):
                if not messages:
                    notes[UNANSWERED] += 1
                    continue
                try:
                    tokens, learnt = chat.encode(messages)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {label}: conversation {number}: {error}") from error
                if count := int(learnt[1:].sum()):
                    notes[LEARNT] += count
                    notes[ENDLESS] += chat.stops.isdisjoint(tokens[learnt].tolist())
                    notes[SPELT] += any(written in part["content"] for part in messages for written in special)
                    yield np.where(learnt, -1 - tokens.astype(np.int32), tokens)
                else:
                    notes[UNANSWERED] += 1

        key = (digest_of(*(source.key() for source in sources)), tokenizer.fingerprint(), chat.fingerprint())
        store = kept(label, key, arrays, np.int32, cache)

        def rows(notes: Notes) -> Iterator[Tokens]:
            return packed(pieces(store, seq_len, notes), seq_len, notes)

        cut = kept(f"rows of {label}", ("rows", store.digest, str(seq_len), str(OPEN)), rows, np.int64, cache)
        return Conversations(name, store, cut, seq_len)

    @property
    def count(self) -> int:
        return len(self.rows.ends)

    def describe(self) -> str:
        notes = self.store.notes + self.rows.notes
        filled = notes[PLACES] / max(1, self.count * self.seq_len)
        conversations = counted(len(self.store.ends), "conversation")
        rows = counted(self.count, "row")
        said = f"{conversations} in {rows}, {filled:.0%} full{told(notes, SAID)}"
        if long := notes[LONG]:
            said += f", {long:,} longer than a row: {notes[BLIND] / notes[LEARNT]:.1%} of what is learnt is in "
            said += f"{counted(notes[LATER], 'later piece')}, which do not see those before"
        return said + (f", {counted(idle, 'piece')} without an answer left out" if (idle := notes[IDLE]) else "")

    def fingerprint(self) -> str:
        return digest_of(self.store.digest, self.rows.digest)

    def row(self, index: int) -> Row:
        tokens, documents = torch.zeros(2, self.seq_len, dtype=torch.int64)
        targets = torch.full((self.seq_len,), -100)
        at = 0
        found = self.rows.document(index).reshape(-1, 2).tolist()
        for number, (start, stop) in enumerate(found):
            signed = torch.from_numpy(self.store.tokens[start:stop].astype(np.int64))
            plain = torch.where(signed < 0, -1 - signed, signed)
            end = at + len(plain) - 1  # the last token is a target alone
            tokens[at:end], documents[at:end] = plain[:-1], number
            targets[at:end] = torch.where(signed[1:] < 0, plain[1:], -100)
            at = end
        documents[at:] = len(found)
        return {"tokens": tokens, "targets": targets, "documents": documents}


LEARNT, UNANSWERED = "tokens learnt", "conversations without an answer"
ENDLESS, SPELT = "conversations without a learnt end", "conversations that spell a special token"
SAID = {
    UNANSWERED: "without an answer left out",
    SPELT: "whose text spells a special token, and has it then",
    ENDLESS: "in which no end is learnt: the template puts none into what the assistant says",
}
PLACES, LONG, LATER = "places filled", "conversations longer than a row", "pieces after a first one"
BLIND, IDLE = "tokens learnt in pieces after a first one", "pieces without an answer"
"""Counts in the notes of stores."""


def pieces(store: Store, seq_len: int, notes: Notes) -> Iterator[tuple[int, int]]:
    """The begin and end of each piece in the store's tokens, at most S + 1 apart: the last one is a target alone."""
    begin = 0
    for end in map(int, store.ends):
        if end - begin <= seq_len + 1:
            yield begin, end
        else:
            notes[LONG] += 1
            for at in range(begin, end - 1, seq_len):
                stop = min(at + seq_len + 1, end)
                if learnt := int((store.tokens[at + 1 : stop] < 0).sum()):
                    later = at > begin
                    notes[LATER] += later
                    notes[BLIND] += later * learnt
                    yield at, stop
                else:
                    notes[IDLE] += 1
        begin = end


OPEN = 32


def packed(found: Iterator[tuple[int, int]], seq_len: int, notes: Notes) -> Iterator[Tokens]:
    """The pieces of each row, [2 x pieces]: each is put into the first of `OPEN` unfilled rows that has room for it."""
    unfilled: list[tuple[list[int], int]] = []  # (pieces, places left), the oldest first
    for start, stop in found:
        places = stop - start - 1
        notes[PLACES] += places
        at = next((i for i, (_, left) in enumerate(unfilled) if places <= left), len(unfilled))
        if at == OPEN:
            yield np.asarray(unfilled.pop(0)[0])
            at -= 1
        row, left = unfilled.pop(at) if at < len(unfilled) else ([], seq_len)
        row += (start, stop)
        if left > places:
            unfilled.insert(at, (row, left - places))
        else:
            yield np.asarray(row)
    yield from (np.asarray(row) for row, _ in unfilled)
