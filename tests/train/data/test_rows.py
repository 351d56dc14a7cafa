"""Windows against slices of the joined files; the split; positions over ranks and epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train.config import ConfigError, Data
from train.data.documents import fingerprint, split, standard_library
from train.data.rows import Place, batches
from train.data.sources import open_text
from train.data.store import Packed
from train.data.tokenizer import Bytes

TEXTS = {"a.txt": b"alpha", "b.txt": b"", "c.txt": b"x", "d/e.txt": b"the quick brown fox jumps", "d/f.txt": b"yy"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    return tmp_path


def corpus_of(folder: Path, seq_len: int) -> Packed:
    config = Data(files=(f"{folder}/**",), heldout_fraction=0.0, seq_len=seq_len)
    training, _ = open_text(config, Bytes(), folder.parent / f"{folder.name}-cache", 0)
    assert isinstance(training, Packed)
    return training


def test_rows_of_bytes_of_files_are_known_by_the_files(folder: Path) -> None:
    """As runs of before know them; text that is no UTF-8 is other text than theirs."""
    paths = [path for path in split(Data(files=(f"{folder}/**",), heldout_fraction=0.0))[0] if path.stat().st_size]
    assert corpus_of(folder, 3).fingerprint() == fingerprint("training text", paths, 3)
    (folder / "c.txt").write_bytes(b"\xff")
    damaged = corpus_of(folder, 3)
    assert damaged.fingerprint() != fingerprint("training text", paths, 3)
    assert damaged.describe().endswith("in 4 documents, 1 of them with U+FFFD, which bytes become that are no UTF-8")
    assert corpus_of(folder, 4).describe() == damaged.describe()  # tokens that were kept say so, too


def rows(corpus: Packed, position: int, ranks: int, size: int, seed: int = 0) -> list[bytes]:
    """What all ranks together read at `position`, in order."""
    places = [Place(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    parts = [next(batches(corpus, position, size, place, seed=seed))[0]["tokens"] for place in places]
    return [bytes(row.tolist()) for row in torch.cat(parts)]


def test_an_epoch_reads_every_window_once_whatever_the_ranks(folder: Path) -> None:
    corpus = corpus_of(folder, 2)
    count = corpus.count
    one_by_one = [row for p in range(count) for row in rows(corpus, p, 1, 1)]
    every = [bytes(corpus.row(i)["tokens"].tolist()) for i in range(count)]
    assert sorted(one_by_one) == sorted(every)
    assert one_by_one != every
    # three ranks of two, then, from the position reached, two ranks of one: as a run resumed on fewer ranks
    mixed = rows(corpus, 0, 3, 2) + [row for p in range(6, count - 1, 2) for row in rows(corpus, p, 2, 1)]
    assert mixed == one_by_one[: len(mixed)]
    assert len(mixed) >= count - 1


def test_epochs_and_seeds_shuffle_differently_and_batches_cross_epochs(folder: Path) -> None:
    corpus = corpus_of(folder, 2)
    count = corpus.count
    first = rows(corpus, 0, 1, count)
    second = rows(corpus, count, 1, count)
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != rows(corpus, 0, 1, count, seed=1)
    assert rows(corpus, count - 2, 2, 2) == first[-2:] + second[:2]


def test_heldout_files_are_whole_files_and_stay_where_they_are(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text("z" * 10)
    data = Data(files=(f"{tmp_path}/*.txt",), heldout_fraction=0.2, seq_len=4)
    train, heldout = split(data)
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 200
    assert 20 <= len(heldout) <= 60
    (tmp_path / "new.txt").write_text("z" * 10)
    again = split(data)[1]
    assert set(heldout) <= set(again)
    assert len(again) <= len(heldout) + 1


def test_named_heldout_files_are_taken_out_of_the_training_text(folder: Path) -> None:
    train, heldout = split(Data(files=(f"{folder}/**",), heldout_files=(f"{folder}/a.txt",), seq_len=2))
    assert [path.name for path in heldout] == ["a.txt"]
    assert [path.name for path in train] == ["b.txt", "c.txt", "e.txt", "f.txt"]


def test_too_little_text_says_how_many_and_what_to_do(folder: Path) -> None:
    corpus = corpus_of(folder, 8)
    corpus.require(4, "a step")
    with pytest.raises(
        ConfigError,
        match=r"training text: .*: only 4 rows: a step needs 5; .*seq-len .* hold out another --data.heldout-fraction",
    ):
        corpus.require(5, "a step")


def test_a_pattern_without_files_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data.files: 'nowhere/\*.txt' names no file"):
        split(Data(files=("nowhere/*.txt",)))


def test_the_standard_library_is_there() -> None:
    names = {path.name for path in standard_library()}
    assert {"dataclasses.py", "argparse.py"} <= names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in standard_library())


def test_bytes_round_trip() -> None:
    tokenizer = Bytes()
    assert tokenizer.decode(tokenizer.encode(["naïve ≤ 3"])[0].tolist()) == "naïve ≤ 3"
    assert tokenizer.decode(tokenizer.encode(["≤"])[0][:1].tolist()) == "\N{REPLACEMENT CHARACTER}"
