"""Who says what in a conversation, by the template; and conversations packed into rows, each once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train import tokenizer
from train.config import Chats, ConfigError, Sources
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


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "a.txt").write_text("One? Yes, one. Two? No. Be short.\n" * 9)
    text = Sources(files=(f"{folder}/a.txt",), heldout_fraction=0)
    tokenizer.learn(tokenizer.Config(folder / "bpe", 512, text))
    found = tokenizers.load(str(folder / "bpe"))
    assert isinstance(found, Pretrained)
    return found


def said(chat: Chat, decode: Any, messages: Messages = TALK) -> str:
    tokens, counts = chat.encode(messages)
    found: str = decode(np.asarray(tokens)[counts].tolist())
    return found


def test_bytes_have_a_turn_for_each_role() -> None:
    chat = ByteChat()
    assert bytes(chat.encode(TALK).tokens) == b"\1Be short.\0\2One?\0\3Yes, one.\0\2Two?\0\3No.\0"
    assert said(chat, bytes) == b"Yes, one.\0No.\0"  # type: ignore[comparison-overlap]
    assert bytes(chat.prompt(TALK[1:2])) == b"\2One?\0\3" and chat.stops == {0}
    with pytest.raises(ConfigError, match=r"role 'tool': conversations in bytes have system, user, assistant"):
        chat.encode([{"role": "tool", "content": "x"}])


WITHOUT_MARKS = tokenizer.TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_templates_with_marks_and_without_learn_what_the_assistant_says(learnt: Pretrained) -> None:
    inner = learnt.inner
    marked = chat_of(learnt)
    assert said(marked, inner.decode) == "Yes, one.<|im_end|>No.<|im_end|>"
    assert marked.stops == {learnt.end, inner.convert_tokens_to_ids("<|im_end|>")}
    assert inner.decode(marked.prompt(TALK[1:2]).tolist()).endswith("One?<|im_end|>\n<|im_start|>assistant\n")
    before = inner.chat_template
    try:
        inner.chat_template = WITHOUT_MARKS
        plain = chat_of(learnt)
        assert plain.encode(TALK).tokens.tolist() == marked.encode(TALK).tokens.tolist()
        assert said(plain, inner.decode) == "Yes, one.<|im_end|>\nNo.<|im_end|>\n"  # a line's end is of the turn
        assert plain.stops == marked.stops and plain.fingerprint() != marked.fingerprint()
        inner.chat_template = "{{ messages | length }}" + WITHOUT_MARKS
        with pytest.raises(ConfigError, match=r"what comes before turn 2 in another way .* \{% generation %\}"):
            chat_of(learnt)
        inner.chat_template = "{{ raise_exception('only users') }}"
        with pytest.raises(ConfigError, match=r"the chat template refuses \[\{'role': .*: only users"):
            chat_of(learnt)
        inner.chat_template = None
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            chat_of(learnt)
    finally:
        inner.chat_template = before


class Said:
    label = "these"

    def __init__(self, found: list[Messages]) -> None:
        self.found = found

    def key(self) -> str:
        return json.dumps(self.found)

    def conversations(self) -> Iterator[Messages]:
        return iter(self.found)


def pair(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_conversations_are_packed_whole_and_once(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    found = [pair(f"q{i}", "a" * int(draw.integers(1, 14))) for i in range(60)]
    found.insert(5, pair("long", "b" * 40))  # is cut off
    found.insert(9, pair("c" * 40, "never reached"))
    rows = Conversations.of("text", [Said(found)], Bytes(), ByteChat(), 30, tmp_path)
    assert "62 conv" not in rows.describe() and rows.describe().startswith("61 conversations in ")
    assert "2 cut off" in rows.describe() and "1 left out, without an answer in a row's length" in rows.describe()
    seen = []
    for index in range(rows.count):
        row = rows.row(index)
        tokens, targets, documents = (row[key] for key in ("tokens", "targets", "documents"))
        assert tokens.shape == (30,) and bool((documents.diff() >= 0).all()) and documents[0] == 0
        last = int(documents.max()) + (documents[-1] == documents.max()) - 1
        for number in range(last + 1):
            at = documents == number
            if bool((targets[at] == -100).all()):
                assert number == documents.max()  # padding
                continue
            own, aims = tokens[at].tolist(), targets[at]
            answer = own.index(3)
            assert bool((aims[:answer] == -100).all()) and bool((aims[answer:] != -100).all())
            assert aims[answer:-1].tolist() == own[answer + 1 :]
            seen.append(bytes([*own, int(aims[-1])]))
    full = [bytes(ByteChat().encode(messages).tokens)[:31] for messages in found if messages[0]["content"][0] != "c"]
    assert sorted(seen) == sorted(full)
    assert rows.count * 30 < sum(map(len, full)) / 0.8  # four fifths are full


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


def test_conversations_of_files_are_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    lines = [{"messages": pair(f"q{i}", f"a{i}"), "other": i} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = Chats(datasets=(f"{tmp_path}/a.jsonl",), heldout_fraction=0.2, seq_len=16, batch=1)
    training, heldout = open_conversations(config, Bytes(), tmp_path / "cache")
    counts = [int(rows.describe().split()[0]) for rows in (training, heldout)]
    assert sum(counts) == 50 and 3 < counts[1] < 25
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "text": "x"}]}\n')
    with pytest.raises(ConfigError, match=r"column 'messages': .*expected \[\{\"role\": \.\.\., \"content\""):
        open_conversations(config, Bytes(), tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}] * 2}) + "\n")
    with pytest.raises(ConfigError, match=r"held-out text|training text: .*conversation 1: role 'tool'"):
        open_conversations(config, Bytes(), tmp_path / "cache")
