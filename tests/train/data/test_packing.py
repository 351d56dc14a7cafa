"""Rows of stored tokens and of streams against rows that are cut by hand; streams that are left and taken up again."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.train.data.tables import (
    jsonl,
    lists,
    packed_by_hand,
    parquet,
    rows_of,
    stopped_and_taken_up,
    text_of,
    texts,
)
from train.config import ConfigError
from train.data.documents import Table, TextFiles
from train.data.store import Packed, Packing, tokenised
from train.data.stream import Stream
from train.data.tokenizer import Bytes


def text_files(folder: Path, found: list[str]) -> TextFiles:
    paths = []
    for index, text in enumerate(found):
        paths.append(folder / f"{index:03}.txt")
        paths[-1].write_text(text)
    return TextFiles(tuple(paths))


@pytest.mark.parametrize("seq_len", [1, 3, 8, 50])
def test_rows_are_those_cut_by_hand(tmp_path: Path, seq_len: int) -> None:
    found = texts(40)
    store = tokenised(text_files(tmp_path, [*found[:20], "", *found[20:]]), Bytes(), tmp_path / "cache")
    packed = Packed("text", store, seq_len, "documents")
    expected = packed_by_hand(found, seq_len)
    assert [lists(packed.row(i)) for i in range(packed.count)] == expected
    joined = "".join(text + "\0" for text in found).encode()
    windows = Packed("text", store, seq_len, "stream")
    assert windows.count == (len(joined) - 1) // seq_len
    for i in range(windows.count):
        part = list(joined[i * seq_len : (i + 1) * seq_len + 1])
        assert lists(windows.row(i)) == {"tokens": part[:-1], "targets": part[1:]}
    assert packed.fingerprint() != windows.fingerprint() != Packed("text", store, seq_len + 1, "stream").fingerprint()


def test_tokens_are_made_once_for_each_content(tmp_path: Path) -> None:
    class Counted(Bytes):
        calls = 0

        def encode(self, found):
            self.calls += 1
            return super().encode(found)

    documents = text_files(tmp_path, texts(9))
    tokenizer = Counted()
    cache = tmp_path / "cache"
    first = tokenised(documents, tokenizer, cache)
    again = tokenised(documents, tokenizer, cache)
    assert tokenizer.calls == 1
    assert first.digest == again.digest
    documents.paths[4].write_text("other")
    assert tokenised(documents, tokenizer, cache).digest != first.digest
    assert tokenizer.calls == 2
    assert not list(cache.glob("*.partial"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"9 files: its tokens cannot be kept in .*file.*; make room"):
        tokenised(documents, tokenizer, blocked / "cache")


def stream(source: str, packing: Packing = "documents", shuffle: int = 16) -> Stream:
    return Stream("text", Table.of(source, "text"), Bytes(), 7, packing, shuffle)


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_an_unshuffled_stream_has_the_rows_of_the_store(tmp_path: Path, packing: Packing) -> None:
    found = texts(60)
    one = stream(jsonl(tmp_path, found, files=1), packing=packing, shuffle=1)
    stored = Packed("", tokenised(one.table, Bytes(), tmp_path / "cache"), 7, packing)
    cursor = one.cursor(0, seed=0)
    got = [lists(row) for row in islice(iter(cursor.next, None), stored.count)]
    assert got == [lists(stored.row(i)) for i in range(stored.count)]


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_every_document_is_read_once_an_epoch_whoever_reads_and_stops(tmp_path: Path, packing: Packing) -> None:
    """Stopped at random steps, taken up by 1, 2 or 3 ranks."""
    found = texts(90)
    one = stream((jsonl if packing == "documents" else parquet)(tmp_path, found), packing=packing)
    total = 150
    unbroken, _ = rows_of(one, 0, 1, 1, total, read_ahead=False)
    assert stopped_and_taken_up(one, total, 6) == [lists(row) for row in unbroken]
    if packing == "stream":
        read = text_of(unbroken).split("\0")
        epochs = [read[:90], read[90:180]]
    else:  # each document ends where its target does
        read = "".join(
            chr(token) + ("|" if target == 0 else "")
            for row in unbroken
            for token, target in zip(row["tokens"].tolist(), row["targets"].tolist(), strict=True)
        ).split("|")
        epochs = [read[:90], read[90:180]]
    assert len(read) > 120, "the rows reach into the second epoch"
    assert Counter(epochs[0]) == Counter(found)
    assert epochs[0] != epochs[1]
    assert set(epochs[1][:-1]) <= set(found)
    assert len(set(epochs[1])) == len(epochs[1])


def test_a_stream_without_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no text in it"):
        stream(jsonl(tmp_path, ["", ""], files=1)).cursor(0, seed=0).next()
