"""Small datasets on the disk, and what is read of them, also by several ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas
import pytest
import torch

from train.data.rows import Place, Position, Reader, Row, Rows, batches


def texts(count: int, seed: int = 0) -> list[str]:
    """No two alike, of 1 to 12 signs each that say which one it is."""
    draw = random.Random(seed)
    return [f"{i}{'abcdefghijk'[: draw.randrange(11)]}" for i in range(count)]


def jsonl(folder: Path, found: Sequence[str], files: int = 3, column: str = "text") -> str:
    """Writes them, in order, into files of about the same size; a glob of those."""
    for k in range(files):
        lines = [json.dumps({column: text}) + "\n" for text in found[k::files]]
        (folder / f"part-{k}.jsonl").write_text("".join(lines))
    return f"{folder}/part-*.jsonl"


def text_of(rows: Sequence[Row]) -> str:
    """Tokens of rows of bytes, one after the other."""
    return b"".join(bytes(row["tokens"].tolist()) for row in rows).decode()


def packed_by_hand(documents: Sequence[str], seq_len: int) -> list[dict[str, list[int]]]:
    """Packed rows of bytes, by the definition: one place after the other."""
    places = [
        (document, token, target)
        for document, text in enumerate(documents)
        for token, target in zip(text.encode(), text.encode()[1:] + b"\0", strict=True)
    ]
    rows = []
    for start in range(0, len(places) - seq_len + 1, seq_len):
        row = places[start : start + seq_len]
        seen = list(dict.fromkeys(document for document, _, _ in row))
        rows.append(
            {
                "tokens": [token for _, token, _ in row],
                "targets": [target for _, _, target in row],
                "documents": [seen.index(document) for document, _, _ in row],
            }
        )
    return rows


def parquet(folder: Path, found: Sequence[str]) -> str:
    """The same in parquet, in row groups of 7."""
    for k in range(3):
        pandas.DataFrame({"text": found[k::3]}).to_parquet(folder / f"part-{k}.parquet", row_group_size=7)
    return f"{folder}/part-*.parquet"


def lists(row: Row) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in row.items()}


def rows_of(
    one: Rows, position: Position, ranks: int, size: int, steps: int, read_ahead: bool
) -> tuple[list[Row], Position]:
    """What `ranks` ranks read together in so many steps, in order, and the position behind."""
    parts: list[list[Row]] = []
    positions = []
    for rank in range(ranks):
        place = Place(rank, ranks, torch.device("cpu"))
        if read_ahead:  # two batches further, which are lost
            with Reader(one, position, size, place, seed=3) as reader:
                found = [reader.next() for _ in range(steps)]
                positions.append(reader.position)
        else:
            some = list(islice(batches(one, position, size, place, seed=3), steps))
            found = [batch for batch, _ in some]
            positions.append(some[-1][1])
        parts.append([{key: batch[key][i] for key in batch} for batch in found for i in range(size)])
    assert all(each == positions[0] for each in positions)
    step = ranks * size
    rows = [parts[i % step // size][i // step * size + i % size] for i in range(steps * step)]
    return rows, json.loads(json.dumps(positions[0]))


def stopped_and_taken_up(one: Rows, total: int, most: int) -> list[dict[str, list[int]]]:
    """The first rows, read by 1, 2 or 3 ranks in turn, which stop after some steps, fewer than `most`."""
    draw = random.Random(1)
    position = 0
    found = list[Row]()
    while len(found) < total:
        ranks = draw.choice([1, 2, 3])
        size = draw.choice([1, 2])
        rows, position = rows_of(one, position, ranks, size, draw.randrange(1, most), read_ahead=draw.random() < 0.5)
        found += rows
    return [lists(row) for row in found[:total]]


def on_the_hub(monkeypatch: pytest.MonkeyPatch, **splits: datasets.Dataset) -> list[tuple[Any, ...]]:
    """The dataset org/name is there, with these splits. Returns what is asked: name, split, and whether streamed."""
    asked = []

    def load(*name: str, split: str, streaming: bool) -> Any:
        asked.append((*name, split, streaming))
        return splits[split].to_iterable_dataset() if streaming else splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: SimpleNamespace(hash="1"))
    return asked
