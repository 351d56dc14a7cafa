"""Documents: texts in an order, from local files or from Hugging Face datasets, one side of the held-out split.

for text in documents.texts(): ...                                  # an epoch, for those who read all of it once
for text, state in table.walk(state, order): ...                    # on from a state, for streams
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from train.config import ConfigError
from train.data import files
from train.data.chat import Messages, checked
from train.data.rows import permutation
from train.data.tokenizer import library

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
"""Suffix of a local file: the reader of `datasets`. Of .txt a line is a document. Each may be compressed, too."""
COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}

Side = Literal["training", "held-out", "both"]


class Documents(Protocol):
    @property
    def label(self) -> str:
        """What they are, for people and errors."""
        ...

    def key(self) -> str:
        """Changes with their content, as far as it is looked at."""
        ...

    def texts(self) -> Iterator[str]:
        """All of them, in order, the empty ones left out."""
        ...


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """A document a file, UTF-8."""

    paths: tuple[Path, ...]

    @property
    def label(self) -> str:
        return f"{len(self.paths)} files"

    def key(self) -> str:
        return files.fingerprint(self.label, self.paths)

    def texts(self) -> Iterator[str]:
        for path in self.paths:
            try:
                text = path.read_bytes().decode(errors="replace")
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
            if text:
                yield text


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of a Hugging Face dataset: local files of one kind, or a name."""

    source: str
    """As the user wrote it: a path, a glob, or `NAME` or `NAME:CONFIG` of the hub."""
    paths: tuple[Path, ...]
    """The local files; none for a name."""
    column: str
    split: str = "train"
    """Of a name; local files are one split."""
    fraction: float = 0.0
    """Which part is held out, by the hash of each text."""
    side: Side = "both"
    streaming: bool = False
    holds: Literal["text", "messages"] = "text"

    @staticmethod
    def of(source: str, column: str) -> Table:
        """Local files where `source` looks like some, else a name."""
        folder = Path(source).expanduser().is_dir()
        if _kind(Path(source)) or any(sign in source for sign in "*?[") or folder:
            return Table.local((source,), column, "data.datasets")
        return Table(source, (), column)

    @staticmethod
    def local(patterns: Sequence[str], column: str, flag: str) -> Table:
        """Files, globs, or folders, all of one kind."""
        paths: list[Path] = []
        for pattern in patterns:
            folder = Path(pattern).expanduser().is_dir()
            found = files.expand([f"{pattern}/**"] if folder else [pattern], flag)
            paths += [path for path in found if _kind(path) or not folder]
        kinds = {_kind(path) for path in paths}
        if len(kinds) != 1 or None in kinds:
            ends = ", ".join(sorted({"".join(path.suffixes[-2:]) for path in paths})) or "no known suffix"
            raise ConfigError(
                f"{flag}: {' '.join(patterns)!r} names files that end in {ends}; expected files of one kind out of "
                f"{', '.join(KINDS)}, compressed or not"
            )
        return Table(" ".join(patterns), tuple(sorted(set(paths))), column)

    @property
    def label(self) -> str:
        return f"{self.source}, {len(self.paths)} files" if self.paths else f"{self.source}, split {self.split}"

    def key(self) -> str:
        more = (self.column, self.fraction, self.side, self.holds)
        if self.paths:
            return files.fingerprint(self.label, self.paths, *more)
        with self._asking():
            builder = library("datasets", "data.datasets").load_dataset_builder(*_named(self.source))
        return repr((self.source, self.split, builder.hash, *more))

    def texts(self) -> Iterator[str]:
        return (text for text, _ in self.walk())

    def conversations(self) -> Iterator[Messages]:
        """All of them, in order."""
        return (messages for messages, _ in self.walk())

    def walk(
        self, state: Any = None, *, order: tuple[int, int] | None = None
    ) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Texts, or messages, from `state` on (None: the first). Each comes with a function that gives the state behind
        it, which JSON can hold, until the next one is asked for.

        order: seed and epoch of a permutation of the local files; None: as they are named
        """
        dataset = self._open(order)
        if state is not None:
            dataset.load_state_dict(state)
        rows = iter(dataset)
        while True:
            try:
                row = next(rows, None)
            except (ConfigError, OSError):
                raise
            except Exception as error:  # of many kinds: a line that is no JSON, columns that change
                raise ConfigError(f"{self.label}: cannot be read: {_first(error)}") from error
            if row is None:
                return
            if self.column not in row:
                there = ", ".join(map(repr, row))
                raise ConfigError(f"{self.label}: there is no column {self.column!r}; there are {there}: --data.column")
            if (found := self._checked(row[self.column])) and self._mine(found):
                yield found, (lambda: json.loads(json.dumps(dataset.state_dict())))

    def _checked(self, value: Any) -> Any:
        """What the column holds; nothing where there is nothing."""
        if self.holds == "messages" and value:
            return checked(value, f"{self.label}: column {self.column!r}")
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.label}: column {self.column!r} holds {value!r:.60}: expected text")
        return value

    def _mine(self, found: Any) -> bool:
        text = found if isinstance(found, str) else json.dumps(found)
        return self.side == "both" or (files.part(text) < self.fraction) == (self.side == "held-out")

    def _open(self, order: tuple[int, int] | None) -> Any:
        datasets = library("datasets", "data.datasets")
        datasets.disable_progress_bars()
        with self._asking():
            if not self.paths:
                found = datasets.load_dataset(*_named(self.source), split=self.split, streaming=self.streaming)
                return found if self.streaming else found.to_iterable_dataset()
            count = len(self.paths)
            paths = [str(self.paths[i]) for i in (permutation(count, *order).tolist() if order else range(count))]
            # streaming: without a copy of local files in the library's cache
            return datasets.load_dataset(_kind(self.paths[0]), data_files=paths, split="train", streaming=True)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # of many kinds: no such name, no network, a damaged file
            raise ConfigError(f"data.datasets: {self.source!r} cannot be opened: {_first(error)}") from error


def _kind(path: Path) -> str | None:
    return KINDS.get(path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix)


def _named(source: str) -> Sequence[str]:
    name, _, config = source.partition(":")
    return [name, config] if config else [name]


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
