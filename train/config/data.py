"""What a run reads: sources, tokens, rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

from train.config.error import counts, require


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of whatever is read."""

    seq_len: int = 256
    """Targets in a sequence, in tokens."""
    batch: int = 4
    """Sequences that each rank reads for one step, over all its microbatches."""

    def __post_init__(self) -> None:
        counts(self, "data.", seq_len=1, batch=1)


@dataclasses.dataclass(frozen=True)
class Tables:
    datasets: tuple[str, ...] = ()
    """Hugging Face datasets, each local files (a folder or a glob of jsonl, parquet, csv, arrow or txt, a line of which
    is a document) or a name of the hub, NAME or NAME:CONFIG."""
    column: str = "text"
    """Of `datasets`: where the text is."""
    split: str = "train"
    """Of `datasets` with a name."""
    heldout_files: tuple[str, ...] = ()
    """Held out: text files, or where none are read, files of a kind as for `datasets`. None given: a part of what is
    read."""
    heldout_split: str = ""
    """Held out, of `datasets` with a name: another split of them. None given: a part of what is read."""
    heldout_fraction: float = 0.05
    """Which part is held out, unless it is named: whole files by the hash of their relative paths, and documents of
    `datasets` by the hash of their text."""

    def __post_init__(self) -> None:
        require(0 <= self.heldout_fraction < 1, f"data.heldout_fraction is {self.heldout_fraction}, not in [0, 1)")
        for field in dataclasses.fields(self):
            if field.name in ("column", "split", "heldout_split") and not self.datasets:
                value = getattr(self, field.name)
                said = f"data.{field.name} is {value!r}, and there are no data.datasets"
                require(value == field.default, said)
        held_twice = bool(self.heldout_split and self.heldout_files)
        require(not held_twice, "data.heldout_split and data.heldout_files both name the held-out text: one of them")


@dataclasses.dataclass(frozen=True)
class Sources(Tables):
    files: tuple[str, ...] = ()
    """Text files or globs (`**` descends). None given, and no `datasets`: the source text of the running Python's
    standard library."""
    streaming: bool = False
    """Read `datasets` as they come: no download, no tokens on the disk. Every rank reads all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.datasets) or not self.streaming, "data.streaming is True, and there are no data.datasets")

    @property
    def reads_files(self) -> bool:
        """Whether text files are among the sources."""
        return bool(self.files or not self.datasets)


@dataclasses.dataclass(frozen=True)
class Data(Rows, Sources):
    shuffle: int = 1024
    """Documents of a stream (`streaming`) that are read together and shuffled."""
    weights: tuple[float, ...] = ()
    """Shares of rows from each source, `files` (as one source) before `datasets`. None given: equal ones."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, a folder with one (`python -m train tokenizer` makes one), or a name of the hub."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: all text as one, cut into rows. documents: attention and positions begin anew with each document."""

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Sources.__post_init__(self)
        counts(self, "data.", shuffle=1)
        positive = all(0 < weight < float("inf") for weight in self.weights)
        require(positive, f"data.weights are {self.weights}: expected positive finite numbers")
        sources = len(self.datasets) + self.reads_files
        require(
            len(self.weights) in (0, sources),
            f"data.weights are {len(self.weights)} numbers, for {sources} sources: data.files counts as one, each of "
            "data.datasets as one",
        )
        require(self.streaming or self.shuffle == 1024, f"data.shuffle is {self.shuffle}: of data.streaming alone")


@dataclasses.dataclass(frozen=True)
class Chats(Rows, Tables):
    column: str = "messages"
    """Of `datasets`: where the messages are, [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]. No
    `datasets`: signatures and docstrings of the running Python's standard library."""

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Tables.__post_init__(self)
        held = bool(self.heldout_files) and not self.datasets
        require(not held, f"data.heldout_files are {self.heldout_files}, and there are no data.datasets")
