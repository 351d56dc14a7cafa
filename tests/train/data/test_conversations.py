"""Who says what in a conversation, by the template; and conversations packed into rows, each once."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from tests.train.data.tables import on_the_hub
from train import tokenizer
from train.config import Chats, ConfigError
from train.data import store
from train.data import tokenizer as tokenizers
from train.data.conversations import ByteChat, Chat, Conversations, chat_of
from train.data.documents import Docstrings, Messages
from train.data.sources import open_conversations
from train.data.tokenizer import Bytes, Pretrained

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture
def learnt(talk_bpe: Path) -> Pretrained:
    found = tokenizers.load(str(talk_bpe))
    assert isinstance(found, Pretrained)
    return found


def said(chat: Chat, decode: Any, messages: Messages = TALK) -> str:
    tokens, counts = chat.encode(messages)
    return decode(np.asarray(tokens)[counts].tolist())


def test_bytes_have_a_turn_for_each_role() -> None:
    chat = ByteChat()
    assert bytes(chat.encode(TALK).tokens) == b"\1Be short.\0\2One?\0\3Yes, one.\0\2Two?\0\3No.\0"
    assert said(chat, bytes) == b"Yes, one.\0No.\0"
    assert bytes(chat.prompt(TALK[1:2])) == b"\2One?\0\3"
    assert chat.stops == {0}
    with pytest.raises(ConfigError, match=r"role 'tool': conversations in bytes have system, user, assistant"):
        chat.encode([{"role": "tool", "content": "x"}])


WITHOUT_MARKS = tokenizer.TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_templates_with_marks_and_without_learn_what_the_assistant_says(learnt: Pretrained) -> None:
    inner = learnt.inner
    marked = chat_of(learnt)
    assert said(marked, inner.decode) == "Yes, one.<|im_end|>No.<|im_end|>"
    assert marked.stops == {learnt.end, inner.convert_tokens_to_ids("<|im_end|>")}
    assert inner.decode(marked.prompt(TALK[1:2]).tolist()).endswith("One?<|im_end|>\n<|im_start|>assistant\n")
    inner.chat_template = WITHOUT_MARKS
    plain = chat_of(learnt)
    assert plain.encode(TALK).tokens.tolist() == marked.encode(TALK).tokens.tolist()
    assert said(plain, inner.decode) == "Yes, one.<|im_end|>\nNo.<|im_end|>\n"  # a line's end is of the turn
    assert plain.stops == marked.stops
    assert plain.fingerprint() != marked.fingerprint()
    inner.chat_template = WITHOUT_MARKS.partition("{% if add_generation_prompt")[0]  # so the assistant says its head
    assert said(chat_of(learnt), inner.decode, TALK[:3]) == "<|im_start|>assistant\nYes, one.<|im_end|>\n"
    assert chat_of(learnt).stops == marked.stops
    for template, message in (
        ("{{ messages | length }}" + WITHOUT_MARKS, r"what comes before turn 2 in another way .* \{% generation %\}"),
        ("{{ raise_exception('only users') }}", r"the chat template refuses \[\{'role': .*: only users"),
        (None, "the tokenizer has no chat template"),
    ):
        inner.chat_template = template
        with pytest.raises(ConfigError, match=message):
            chat_of(learnt)


class Said:
    label = "these"

    def __init__(self, found: list[Messages]) -> None:
        self.found = found

    def key(self) -> str:
        return json.dumps(self.found)

    def conversations(self) -> Iterator[Messages]:
        return iter(self.found)


def rows_of(source: Any, cache: Path, seq_len: int = 30) -> Conversations:
    return Conversations.of("text", [source], Bytes(), ByteChat(), seq_len, cache)


def of_nine(cache: Path) -> Conversations:
    return rows_of(Said(few(9)), cache)


def pair(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


Piece = tuple[list[int], list[int]]
"""Tokens and targets."""


def plain(encoded: Any, seq_len: int) -> list[Piece]:
    """What is learnt from a conversation, cut by hand: (tokens, targets) of each piece in which something is."""
    tokens = encoded[0].tolist()
    learnt = encoded[1].tolist()
    aims = [token if counts else -100 for token, counts in zip(tokens, learnt, strict=True)]
    cuts = range(0, max(1, len(tokens) - 1), seq_len)
    found = [(tokens[at : at + seq_len][: len(tokens) - 1 - at], aims[at + 1 : at + 1 + seq_len]) for at in cuts]
    return [(own, after) for own, after in found if any(aim != -100 for aim in after)]


def taken_apart(rows: Conversations) -> list[Piece]:
    """The same, of all rows, checked for their form."""
    found = []
    for index in range(rows.count):
        row = rows.row(index)
        tokens, targets, documents = (row[key] for key in ("tokens", "targets", "documents"))
        assert tokens.shape == (rows.seq_len,)
        assert set(documents.diff().tolist()) <= {0, 1}
        assert documents[0] == 0
        for number in documents.unique().tolist():
            at = documents == number
            if bool((targets[at] != -100).any()):
                found.append((tokens[at].tolist(), targets[at].tolist()))
            else:
                assert number == documents.max() and not tokens[at].any(), "padding"
    return found


def test_each_conversation_is_learnt_once_also_one_of_three_and_a_half_rows(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    found = [pair(f"q{i}", "a" * int(draw.integers(1, 14))) for i in range(60)]
    found.insert(5, pair("long", "b" * 98))  # 2 long 0 3 b ... 0: 105 places, three rows of 30 and a half
    found.insert(9, pair("c" * 40, "heard, though nothing before it is"))
    found.insert(20, [{"role": "user", "content": "nobody answers"}])
    rows = rows_of(Said(found), tmp_path)
    expected = [piece for messages in found for piece in plain(ByteChat().encode(messages), 30)]
    assert sorted(taken_apart(rows)) == sorted(expected)
    long = [aims for own, aims in plain(ByteChat().encode(found[5]), 30)]
    assert [len(aims) for aims in long] == [30, 30, 30, 15]
    assert bytes(aim for aims in long for aim in aims if aim != -100) == b"b" * 98 + b"\0"
    learnt = sum(aim != -100 for _, aims in expected for aim in aims)
    later = sum(aim != -100 for aims in long[1:] for aim in aims) + len(found[9][1]["content"]) + 1
    assert rows.describe().startswith(f"62 conversations in {rows.count} rows, ")
    assert rows.describe().endswith(
        f"full, 1 without an answer left out, 2 longer than a row: {later / learnt:.1%} of what is learnt is in "
        "5 later pieces, which do not see those before, 1 piece without an answer left out"
    )
    assert rows.count * 30 < sum(len(own) for own, _ in expected) / 0.8  # four fifths are full
    # other rows of the same tokens, and a second run, which makes neither
    made = sorted(tmp_path.glob("*/facts.json"))
    other = rows_of(Said(found), tmp_path, 200)
    assert "longer" not in other.describe()
    assert len(sorted(tmp_path.glob("*/facts.json"))) == len(made) + 1 == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteChat, "encode", lambda *_: pytest.fail("conversations are written a second time"))
        again = rows_of(Said(found), tmp_path)
    assert again.fingerprint() == rows.fingerprint() != other.fingerprint()


def test_what_ends_no_answer_is_said(learnt: Pretrained, tmp_path: Path) -> None:
    for template, words in (
        (WITHOUT_MARKS, ""),
        (
            tokenizer.TEMPLATE.replace(" + '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}"),
            ", 1 in which no end",
        ),
    ):
        learnt.inner.chat_template = template
        rows = Conversations.of("text", [Said([TALK])], learnt, chat_of(learnt), 99, tmp_path)
        assert rows.describe().startswith(f"1 conversation in 1 row, {rows.describe().split()[5]} full{words}")
        assert bool(words) == ("no end is learnt" in rows.describe())


def test_conversations_come_one_by_one_and_no_more_are_held(tmp_path: Path) -> None:
    """A data set that does not fit into memory: of a thousand conversations of 64 KiB, few are there at once, and what
    is allocated at the most does not grow with their number."""

    class Message(dict[str, str]):
        there = most = 0

        def __init__(self, **message: str) -> None:
            super().__init__(message)
            Message.there += 1
            Message.most = max(Message.most, Message.there)

        def __del__(self) -> None:
            Message.there -= 1

    class Many(Said):
        def conversations(self) -> Iterator[Messages]:
            for messages in self.found:
                yield [Message(role="user", content=str(messages)), Message(role="assistant", content="a" * 2**14)]

    def peak(count: int) -> int:
        tracemalloc.start()
        rows = rows_of(Many([[]] * count), tmp_path, 2**12)
        rows.row(rows.count - 1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(rows.store.tokens) > count * 2**14
        return found

    few = peak(20)
    many = peak(400)
    assert Message.most <= 4 and many < few + 2**17, f"{few:,} bytes of 20 conversations, {many:,} of 400"


def making(cache: Path, count: int, *, fails: bool) -> None:
    """In a process of its own: conversations that take a while, since each waits until the file `go` is there."""

    class Slow(Said):
        def conversations(self) -> Iterator[Messages]:
            for messages in self.found:
                (cache / "begun").touch()
                while not (cache / "go").exists():
                    time.sleep(0.01)
                yield [{"role": "tool", "content": ""}] if fails else messages

    try:
        rows_of(Slow(few(count)), cache)
    except ConfigError as error:
        (cache / f"error-{os.getpid()}").write_text(str(error))


def few(count: int) -> list[Messages]:
    return [pair(f"{i}?", "yes") for i in range(count)]


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts `making` in another process, and waits until that has begun."""
    begun = []

    def start(*, fails: bool = False) -> Any:
        process = multiprocessing.get_context("fork").Process(
            target=making, args=(tmp_path, 9), kwargs={"fails": fails}
        )
        process.start()
        begun.append(process)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        return process

    yield start
    for process in begun:
        process.kill()
        process.join()


def test_a_killed_maker_leaves_nothing_that_counts(tmp_path: Path, maker: Callable[..., Any]) -> None:
    process = maker()
    (left,) = tmp_path.glob("*.partial")
    process.kill()
    process.join()
    assert left.exists() and list(tmp_path.glob("*.lock")), "it was killed in the middle"
    rows = of_nine(tmp_path)
    assert len(rows.store.ends) == 9
    assert not list(tmp_path.glob("*.partial"))
    fresh = of_nine(tmp_path / "fresh")
    assert rows.fingerprint() == fresh.fingerprint()


def test_who_waits_gets_the_tokens_or_the_error_of_who_makes_them(
    tmp_path: Path, maker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteChat, "encode", lambda *_: pytest.fail("who waits does not write conversations itself"))
    monkeypatch.setattr(store, "POLL", 0.02)
    monkeypatch.setattr(store, "time", Going(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ByteChat, "encode", ENCODE)
        maker(fails=True)
    with pytest.raises(ConfigError, match=r"text: these: conversation 1: role 'tool'"):
        of_nine(tmp_path)
    (tmp_path / "go").unlink()
    (tmp_path / "begun").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(ByteChat, "encode", ENCODE)
        maker()
    rows = of_nine(tmp_path)
    assert len(rows.store.ends) == 9


ENCODE = ByteChat.encode


class Going:
    """The module `time` for one who waits: its first pause lets the others go on."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sleep(self, seconds: float) -> None:
        (self.folder / "go").touch()
        time.sleep(seconds)


def test_a_frozen_maker_is_named(tmp_path: Path, maker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    process = maker()
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(store, "POLL", 0.01)
    monkeypatch.setattr(store, "SILENT", 0.1)
    with pytest.raises(
        ConfigError, match=rf"process {process.pid} on .*, which makes its tokens, has given no sign of"
    ):
        of_nine(tmp_path)


def test_who_makes_tokens_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's time changes while no conversation comes, and on the terminal there is a line of how far it is."""
    monkeypatch.setattr(store, "BEAT", 0.005)
    monkeypatch.setattr(store, "SPEAKS", 0.0)
    said: list[str] = []
    monkeypatch.setattr(store, "say_apart", said.append)

    class Slow(Said):
        def conversations(self) -> Iterator[Messages]:
            yield from self.found
            (lock,) = tmp_path.glob("*.lock")
            begun = lock.stat().st_mtime_ns
            while lock.stat().st_mtime_ns == begun or not said:
                time.sleep(0.005)

    rows_of(Slow(few(9)), tmp_path)
    assert any(re.fullmatch(r"making tokens of these: 9 documents, \d+ tokens so far", line) for line in said)


def test_docstrings_are_signatures_and_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'def f(a, *b, c: int = 0) -> str:\n    """Does it.\n\n    And more.\n    """\n\n\ndef g():\n    pass\n\n\n'
        'class C:\n    async def h(self):\n        "Waits."\n'
    )
    (tmp_path / "b.py").write_text("def broken(:\n")
    found = list(Docstrings((tmp_path / "a.py", tmp_path / "b.py")).conversations())
    assert found == [
        pair("def f(a, *b, c: int=0) -> str:", "Does it.\n\nAnd more."),
        pair("async def h(self):", "Waits."),
    ]


def both_sides(folder: Path, name: str = "a.jsonl") -> tuple[Any, Any]:
    """Training and held-out rows of a file of the folder, or of a name on the hub."""
    source = name if "/" in name else f"{folder}/{name}"
    config = Chats(datasets=(source,), heldout_fraction=0.2, seq_len=16, batch=1)
    return open_conversations(config, Bytes(), folder / "cache")


def test_conversations_of_the_hub_are_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = datasets.Dataset.from_dict({"messages": [pair(f"q{i}", f"a{i}") for i in range(50)]})
    asked = on_the_hub(monkeypatch, train=kept)
    sides = both_sides(tmp_path, "org/name")
    assert sum(int(rows.describe().split()[0]) for rows in sides) == 50
    assert set(asked) == {("org/name", "train", True)}


def test_conversations_of_files_are_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    lines = [{"messages": pair(f"q{i}", f"a{i}"), "other": i} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    training, heldout = both_sides(tmp_path)
    counts = [int(rows.describe().split()[0]) for rows in (training, heldout)]
    assert sum(counts) == 50
    assert 3 < counts[1] < 25
    pandas.DataFrame(lines).to_parquet(tmp_path / "a.parquet")
    same = both_sides(tmp_path, "a.parquet")
    assert [rows.fingerprint() for rows in same] == [training.fingerprint(), heldout.fingerprint()]
    odd = [pair("a\0", "b"), pair("a", "b"), [], None, pair("only asked", "")[:1]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in odd))
    told = " ".join(rows.describe() for rows in both_sides(tmp_path))
    assert "2 without an answer left out, 1 whose text spells a special token" in told  # and on the other side
    assert told.endswith("1 without an answer left out")
    messages = [*pair("a", ""), {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}], "id": 3}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ConfigError, match=r"messages also have tool_calls, which a model would be taught without"):
        both_sides(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "text": "x"}]}\n')
    with pytest.raises(ConfigError, match=r"column 'messages': .*expected \[\{\"role\": \.\.\., \"content\""):
        both_sides(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}] * 2}) + "\n")
    with pytest.raises(ConfigError, match=r"held-out text|training text: .*conversation 1: role 'tool'"):
        both_sides(tmp_path)
