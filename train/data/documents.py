"""Documents: texts in an order, from local files or from Hugging Face datasets, one side of the held-out split.

for text in documents.texts(): ...                                  # an epoch, for those who read all of it once
for text, state in table.walk(state, order): ...                    # on from a state, for streams

Local files: `expand` finds those that patterns name, `split` holds some out, `fingerprint` tells their content apart.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from train.config import ConfigError, Sources
from train.data.rows import permutation
from train.data.tokenizer import library
from yafsdp_fn.util.words import counted

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
"""Suffix of a local file: the reader of `datasets`. Of .txt a line is a document. Each may be compressed, too."""
COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}
NO_TEXT = {".jsonl", ".parquet", ".arrow"} | COMPRESSED
"""Suffixes of files whose bytes are not the text that is in them."""

Messages = Sequence[Mapping[str, str]]

Side = Literal["training", "held-out", "both"]


class Documents(Protocol):
    @property
    def label(self) -> str:
        """Names them, for people and errors."""
        ...

    def key(self) -> str:
        """Changes with their content, as far as it is looked at."""
        ...

    def texts(self) -> Iterator[str]:
        """All of them, in order. Empty ones may be among them."""
        ...


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """A document a file, UTF-8."""

    paths: tuple[Path, ...]

    @property
    def label(self) -> str:
        return counted(len(self.paths), "file")

    def key(self) -> str:
        return fingerprint(self.label, self.paths)

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
    """The user's words: a path, a glob, or `NAME` or `NAME:CONFIG` of the hub."""
    paths: tuple[Path, ...]
    """The local files; none for a name."""
    column: str
    split: str = "train"
    """Split of a name; local files are one split."""
    fraction: float = 0.0
    """The part that is held out, by the hash of each text."""
    side: Side = "both"
    streaming: bool = False
    holds: Literal["text", "messages"] = "text"

    @staticmethod
    def of(source: str, column: str) -> Table:
        """Local files where `source` looks like some, else a name."""
        there = Path(source).expanduser().exists()
        if _kind(Path(source)) or any(sign in source for sign in "*?[") or there:
            return Table.local((source,), column, "data.datasets")
        return Table(source, (), column)

    @staticmethod
    def local(patterns: Sequence[str], column: str, flag: str) -> Table:
        """Files, globs, or folders, all of one kind."""
        paths: list[Path] = []
        for pattern in patterns:
            folder = Path(pattern).expanduser().is_dir()
            found = expand([f"{pattern}/**"] if folder else [pattern], flag)
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
        return (
            f"{self.source}, {counted(len(self.paths), 'file')}" if self.paths else f"{self.source}, split {self.split}"
        )

    def key(self) -> str:
        more = (self.column, self.fraction, self.side, self.holds)
        if self.paths:
            return fingerprint(self.label, self.paths, *more)
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
            try:
                dataset.load_state_dict(state)
            except Exception as error:  # of many kinds: whatever a checkpoint from somebody leads to
                raise ConfigError(
                    f"{self.label}: it cannot be gone on with from the checkpoint: {_first(error)}"
                ) from error
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
            if self._mine(found := self._checked(row[self.column])):
                yield found, (lambda: json.loads(json.dumps(dataset.state_dict())))

    def _checked(self, value: Any) -> Any:
        """The column's value; where there is none, an empty text, or no messages."""
        if self.holds == "messages":
            return checked(value, f"{self.label}: column {self.column!r}") if value else []
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.label}: column {self.column!r} holds {value!r:.60}: expected text")
        return value or ""

    def _mine(self, found: Any) -> bool:
        text = found if isinstance(found, str) else json.dumps(found)
        return self.side == "both" or (part(text) < self.fraction) == (self.side == "held-out")

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
    if more := sorted({name for part in parts for name, value in part.items() if name in MEANT and value is not None}):
        raise ConfigError(
            f"{where}: messages also have {', '.join(more)}, which a model would be taught without: only role and "
            "content are read. Write them into the content, or leave those messages out"
        )
    return messages


MEANT = frozenset(
    (
        "tool_calls",
        "tool_call_id",
        "function_call",
        "name",
        "weight",
        "train",
        "thinking",
        "reasoning_content",
        "images",
    )
)
"""Fields of messages, beside role and content, that say what is learnt; any others are taken for notes."""


def _kind(path: Path) -> str | None:
    return KINDS.get(path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix)


def _named(source: str) -> Sequence[str]:
    name, _, config = source.partition(":")
    return [name, config] if config else [name]


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


HASHED = 2**30
"""Bytes of all files that a fingerprint reads, about a second: all of most, blocks spread evenly over larger ones."""
BLOCK = 2**16

NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def split(config: Sources) -> tuple[list[Path], list[Path]]:
    """`(training, held-out)` text files; the same on every rank that sees the same files."""
    found = expand(config.files, "data.files") if config.files else standard_library()
    if config.heldout_files:
        heldout = expand(config.heldout_files, "data.heldout_files")
        found = [path for path in found if path not in set(heldout)]
    else:
        found, heldout = halves_of(found, config.heldout_fraction)
    for path in (*found, *heldout):
        if path.suffix in NO_TEXT:
            raise ConfigError(
                f"data.files: {path} is a table, or compressed, and would be read as if it were text: --data.datasets "
                "reads rows of such files; leave it out, or unpack it"
            )
    return found, heldout


def halves_of(found: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """`(the rest, a fraction of the files)`, by the hash of their relative paths: a new file moves no other across."""
    root = Path(os.path.commonpath([path.parent for path in found]))
    out = {path for path in found if part(path.relative_to(root).as_posix()) < fraction}
    return [path for path in found if path not in out], [path for path in found if path in out]


def expand(patterns: Sequence[str], flag: str) -> list[Path]:
    """The files that paths and globs name, sorted; a pattern that names none is an error."""
    found: set[Path] = set()
    for pattern in patterns:
        try:
            matches = [Path(match).resolve() for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
            files = [match for match in matches if match.is_file()]
        except (OSError, ValueError) as error:  # bytes that no file name has; links that go round
            raise ConfigError(f"{flag}: {pattern!r}: {error}") from None
        if not files:
            raise ConfigError(f"{flag}: {pattern!r} names no file (current folder: {os.getcwd()})")
        found.update(files)
    return sorted(found)


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library: some 11 MB of text that every machine has."""
    found = []
    for folder, folders, files in os.walk(Path(sysconfig.get_path("stdlib")).resolve()):
        folders[:] = [name for name in folders if name not in NOT_SOURCE]  # site-packages may be vast: not entered
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def part(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(name: str, files: Sequence[Path], *more: object) -> str:
    """Changes with the files' names, order, sizes or content, and with `more`.

    Of files larger than `HASHED` together, every k-th block of `BLOCK` bytes of each is read, the first one always:
    what changed between them alone is not noticed.

    name: as errors call the files
    """
    try:
        sizes = [path.stat().st_size for path in files]
        names = [(path.name, size) for path, size in zip(files, sizes, strict=True)]
        digest = hashlib.blake2b(repr((names, *more)).encode(), digest_size=8)
        stride = BLOCK * max(1, -(-sum(sizes) // HASHED))
        for path, size in zip(files, sizes, strict=True):
            with open(path, "rb") as stream:
                for start in range(0, size, stride):
                    stream.seek(start)
                    digest.update(stream.read(BLOCK))
    except OSError as error:
        raise ConfigError(f"{name}: {error.filename} cannot be read: {error}") from None
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Docstrings:
    """The user says `def f(a, b=0):`, the assistant what its docstring says."""

    paths: tuple[Path, ...]

    @property
    def label(self) -> str:
        return f"docstrings of {counted(len(self.paths), 'file')}"

    def key(self) -> str:
        return fingerprint(self.label, self.paths, "docstrings")

    def conversations(self) -> Iterator[Messages]:
        for path in self.paths:
            try:
                with warnings.catch_warnings(action="ignore"):  # of the text's own: an escape that is none
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # of another Python, or for tools alone
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (said := ast.get_docstring(node)):
                    yield [{"role": "user", "content": signature(node)}, {"role": "assistant", "content": said}]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`def f(a, b=0) -> int:`"""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}:"
