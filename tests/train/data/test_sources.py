"""Sources as settings name them: kinds of files, held-out text, mixtures, tokenizers; and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch

from tests.train.data.tables import jsonl, on_the_hub, text_of, texts
from train import tokenizer
from train.config import ConfigError, Data, Optim, Sources
from train.data import sources
from train.data import tokenizer as tokenizers
from train.data.rows import HAND, Indexed, Mixed, Position, Row, Rows, at_most, shares
from train.data.tokenizer import Bytes
from train.running import setup


def opened(folder: Path, heldout_rows: int = 4, **settings: Any) -> tuple[Rows, Rows]:
    """Training and held-out text, with a cache in the folder."""
    data = Data(seq_len=4, **settings)
    return sources.open_text(data, tokenizers.load(data.tokenizer), folder / "cache", heldout_rows)


def epoch(rows: Rows) -> set[str]:
    """The documents of the first epoch, packed, that are whole in it."""
    cursor = rows.cursor(0, 0)
    if isinstance(rows, Indexed):
        found = [rows.row(i) for i in range(rows.count)]
    else:
        found = [row for row in iter(cursor.next, None) if cursor.position["place"][0] == 0 or stop()]
    return set(text_of(found).split("\0"))


def stop() -> bool:
    """Ends the generator that it is called in."""
    raise StopIteration


def documents(source: Any, **settings: Any) -> Any:
    """Of training and of held-out text."""
    return sources.documents(Sources(datasets=(str(source),), **settings))


def test_kinds_of_files_and_held_out_documents(tmp_path: Path) -> None:
    found = texts(60)
    table = pandas.DataFrame({"body": found, "other": range(60)})
    (tmp_path / "one").mkdir()
    table.to_parquet(tmp_path / "one" / "a.parquet")
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.json.gz", orient="records", lines=True)
    (tmp_path / "a.txt").write_text("\n".join(found))
    kinds = {"one": "body", "a.csv": "body", "a.json.gz": "body", "a.txt": "text"}
    sides = []
    for name, column in kinds.items():
        ((training, heldout),) = documents(tmp_path / name, column=column, heldout_fraction=0.2)
        parts = list(training.texts()), list(heldout.texts())
        assert sorted(parts[0] + parts[1]) == sorted(found)
        assert 3 < len(parts[1]) < 25
        sides.append(parts)
        assert training.key() != heldout.key()
    assert all(each == sides[0] for each in sides)
    ((training, heldout),) = documents(tmp_path / "one", column="body", heldout_files=(f"{tmp_path}/a.csv",))
    assert list(training.texts()) == found == list(heldout.texts())
    glob = jsonl(tmp_path, found[:9], column="body")
    named = glob.replace("*", "1")
    ((training, heldout),) = documents(glob, column="body", heldout_files=(named,))
    assert sorted([*training.texts(), *heldout.texts()]) == found[:9]
    assert list(heldout.texts()) == found[1:9:3]


def test_rows_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = ['{"text": "one"}', '{"text": null}', '{"other": 1}', '{"text": ""}', '{"text": "two"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    settings = {"datasets": (f"{tmp_path}/a.jsonl",), "heldout_fraction": 0}
    assert opened(tmp_path, **settings)[0].describe() == "8 tokens in 2 documents, 3 without text left out"
    training, heldout = opened(tmp_path, streaming=True, **settings)
    assert at_most(heldout) == 0
    cursor = training.cursor(0, 0)
    first = text_of([row for _ in range(2) if (row := cursor.next()) is not None])
    assert sorted(first.split("\0")) == ["", "one", "two"]


def test_parts_of_a_split_may_be_held_out() -> None:
    parts = {"split": "train[:95%]", "heldout_split": "train[95%:]"}
    assert Data(datasets=("a",), **parts).heldout_split == "train[95%:]"
    assert Data(datasets=("a",), heldout_split="train_small").split == "train"


def test_a_folder_is_a_dataset_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub gives, in its place: `load_dataset` of a name, with splits."""
    kept = {
        split: datasets.Dataset.from_dict({"text": texts(20, seed)}) for seed, split in enumerate(("train", "test"))
    }
    asked = on_the_hub(monkeypatch, **kept)
    for streaming in (False, True):
        ((training, heldout),) = documents("org/name:config", heldout_split="test", streaming=streaming)
        assert list(training.texts()) == texts(20, 0)
        assert list(heldout.texts()) == texts(20, 1)
        assert training.key() != heldout.key()
    with pytest.raises(ConfigError, match=r"'org/name:config' cannot be opened: 'nosuch'"):
        list(documents("org/name:config", split="nosuch")[0][0].texts())
    assert {each[:2] for each in asked} == {("org/name", "config")}


def test_a_stream_and_a_store_hold_out_the_same_documents(tmp_path: Path) -> None:
    glob = jsonl(tmp_path, texts(200))
    settings = {"datasets": (glob,), "heldout_fraction": 0.2, "packing": "stream"}
    stored = opened(tmp_path, **settings)
    streamed = opened(tmp_path, streaming=True, **settings)
    assert streamed[1].describe().startswith("4 rows of a stream of ")
    first = epoch(stored[1])
    assert set(text_of([streamed[1].row(i) for i in range(4)]).split("\0")[:-1]) <= first
    with pytest.raises(ConfigError, match=r"held-out text: .*: only \d rows?: an evaluation needs 5;"):
        streamed[1].require(5, "an evaluation")
    assert {each[0].fingerprint() for each in (stored, streamed)} != {stored[0].fingerprint()}
    again = opened(tmp_path, streaming=True, **settings)
    assert [each.fingerprint() for each in again] == [each.fingerprint() for each in streamed]


# ---- mixtures


class Numbered(Indexed):
    """Rows that are their source's letter and their own number."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._count = count

    @property
    def count(self) -> int:
        return self._count

    def row(self, index: int) -> Row:
        return {"tokens": torch.tensor([ord(self.name), index])}

    def fingerprint(self) -> str:
        return self.name

    def describe(self) -> str:
        return self.name


def read(rows: Rows, position: Position, count: int) -> tuple[list[tuple[int, ...]], Position]:
    """So many rows from a position, and the position behind them, through JSON."""
    cursor = rows.cursor(position, 5)
    found = list(islice(iter(cursor.next, None), count))
    return [tuple(row["tokens"].tolist()) for row in found], json.loads(json.dumps(cursor.position))


def test_a_mixture_has_its_shares_and_epochs_of_each_source(tmp_path: Path) -> None:
    mixed = Mixed("text", (Numbered("a", 1000), Numbered("b", 700), Numbered("c", 90)), (5.0, 2.0, 0.5))
    assert shares(mixed.weights) == (2731, 1092, 273)
    assert at_most(mixed) == 90 * HAND // 273
    rows, end = read(mixed, 0, 2 * HAND)
    assert end == 2 * HAND
    counts = Counter(chr(name) for name, _ in rows)
    assert counts == {"a": 2 * 2731, "b": 2 * 1092, "c": 2 * 273}
    for start in range(0, HAND, 512):  # shares are near everywhere
        assert 0.55 < sum(name == ord("a") for name, _ in rows[start : start + 512]) / 512 < 0.78
    for name, count in (("a", 1000), ("b", 700), ("c", 90)):
        own = [index for letter, index in rows if letter == ord(name)]
        for begin in range(0, len(own) - count + 1, count):
            assert sorted(own[begin : begin + count]) == list(range(count))
    first, position = read(mixed, 0, HAND - 100)
    assert first + read(mixed, position, HAND + 100)[0] == rows
    with pytest.raises(ConfigError, match=r"data.weights 1e-05 is less than one row in 4096"):
        shares((1.0, 1e-5))


# ---- tokenizers


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"line {i} of a text that is easy to learn\n" * 20)
    config = tokenizer.Config(folder / "bpe", 512, Sources(files=(f"{folder}/*.txt",), heldout_fraction=0.3))
    said = tokenizer.learn(config)
    assert said.startswith(f"{folder}/bpe: ")
    assert "bytes each in" in said
    with pytest.raises(ConfigError, match=r"out is .*bpe, which is there already"):
        tokenizer.learn(config)
    return folder


def test_a_tokenizer_that_was_learnt_reads_any_text(bpe: Path, tmp_path: Path) -> None:
    learnt = tokenizers.load(str(bpe / "bpe"))
    for text in ("line 3 of a text", "naïve ≤ 3", "\0\n\t", "<|endoftext|> x"):
        assert learnt.decode(learnt.encode([text])[0].tolist()) == text
    assert len(learnt.encode(["line 3 of a text that is easy to learn"])[0]) < 15
    assert learnt.encode([]) == []
    assert learnt.end not in learnt.encode(["<|endoftext|>"])[0]
    learnt.save(tmp_path / "copy")
    copy = tokenizers.load(str(tmp_path / "copy"))
    assert (copy.fingerprint(), copy.vocab, copy.end) == (learnt.fingerprint(), learnt.vocab, learnt.end)
    assert setup.vocabulary("debug", 0, learnt) % 64 == 0 <= setup.vocabulary("debug", 0, learnt) - learnt.vocab < 64
    assert setup.vocabulary("debug", 0, Bytes()) == 256
    assert setup.model_config("debug", 512).vocab == 512
    training, _ = opened(tmp_path, files=(f"{bpe}/*.txt",), tokenizer=str(bpe / "bpe"), packing="documents")
    assert int(max(row["tokens"].max() for row in map(training.row, range(3)))) < learnt.vocab
    bare = tokenizers.load(str(bpe / "bpe" / "tokenizer.json"))
    assert bare.end == learnt.end
    assert bare.encode(["a text"])[0].tolist() == learnt.encode(["a text"])[0].tolist()


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weights": (1.0, 2.0)}, "data.weights are 2 numbers, for 1 sources"),
        ({"datasets": ("a", "b"), "weights": (1.0, -2.0)}, "expected positive finite numbers"),
        ({"streaming": True}, "data.streaming is True, and there are no data.datasets"),
        ({"column": "body"}, "data.column is 'body', and there are no data.datasets"),
        ({"heldout_split": "test"}, "data.heldout_split is 'test', and there are no data.datasets"),
        ({"datasets": ("a",), "shuffle": 5}, "data.shuffle is 5: of data.streaming alone"),
        ({"datasets": ("./*.bin",)}, r"data.datasets: .*names no file"),
        ({"datasets": ("./*",)}, r"names files that end in \.jsonl, \.md; expected files of"),
        ({"datasets": ("./a.jsonl",)}, "no column 'text'; there are 'body': --data.column"),
        ({"datasets": ("./n.jsonl",), "column": "n"}, "column 'n' holds 7: expected text"),
        ({"datasets": ("./bad.jsonl",)}, r"bad.jsonl, 1 file: cannot be read: "),
        ({"datasets": ("./a.jsonl",), "split": "test"}, "local files: leave it out"),
        ({"datasets": ("./a.md",)}, r"names files that end in \.md; expected files of"),
        ({"files": ("./*",)}, r"data.files: .*a\.jsonl is a table, or compressed, and would"),
        (
            {"files": ("./a.md",), "heldout_files": ("./a.jsonl",)},
            r"data.files: .*a\.jsonl is a table, or compressed, and would",
        ),
        (
            {"datasets": ("./a.jsonl",), "column": "body", "heldout_files": ("./*.jsonl",)},
            r"data.heldout_files name all files of '.*a\.jsonl': none is left",
        ),
        ({"datasets": ("a",), "heldout_split": "train"}, "heldout_split is 'train', data.split 'train': what"),
        ({"datasets": ("a",), "heldout_split": "train[9:]"}, "what is held out is trained on; name another"),
        ({"tokenizer": "./nosuch"}, r"data.tokenizer: '.*nosuch' cannot be read: "),
        ({"tokenizer": "./a.jsonl"}, r"data.tokenizer: '.*a.jsonl' cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "a.jsonl": '{"body": "x"}\n',
        "n.jsonl": '{"n": 7}\n',
        "bad.jsonl": '{"text": "x"}\n{"text": \n',
        "a.md": "x",
    }.items():
        Path(name).write_text(content)
    with pytest.raises(ConfigError, match=text):
        opened(tmp_path, **settings)


@pytest.mark.parametrize("name", ["datasets", "transformers"])
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    settings = {"datasets": (jsonl(tmp_path, texts(3)),)} if name == "datasets" else {"tokenizer": "x"}
    with pytest.raises(ConfigError, match=rf"needs the library {name}: pip install 'yafsdp_fn\[data\]'"):
        opened(tmp_path, **settings)
    training, _ = opened(tmp_path)  # bytes of text need neither
    assert training.cursor(0, 0).next() is not None


def test_wsd_is_flat_and_falls_at_the_end() -> None:
    rate = setup.learning_rate(Optim(learning_rate=1.0, warmup=4, decay="wsd", decay_steps=5, final_fraction=0.1), 20)
    got = [float(rate(step)) for step in range(21)]
    assert got[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert got[4:16] == [1.0] * 12
    assert got[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
