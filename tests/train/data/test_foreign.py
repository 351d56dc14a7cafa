"""Stores and pipelines of other libraries: read as they are documented, and as the libraries themselves write them."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.pool import Pools
from tests.train.data.tables import lists, rows_of, stopped_and_taken_up, texts
from tests.train.data.test_sources import opened
from tests.train.inside import WINDOW, Run, flags, inside, killed, of_others, resumed, without
from train.config import ConfigError, Data
from train.data.foreign import Pipeline, from_json, to_json
from train.data.rows import Indexed, Mixed, Row, Rows
from train.data.store import AT_ONCE


def stored(path: Path, **settings: Any) -> tuple[Rows, Rows]:
    """The rows of a store, in a cache beside it."""
    return opened(path.parent, stores=(str(path),), **settings)


def refused(path: Path, message: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        stored(path, **settings)


# ---- stores


def megatrons(prefix: Path, found: list[list[int]], kind: Any = np.uint16, code: int = 8, cut: int = 1) -> None:
    """Writes a store by the published format. cut: sequences that a document is in"""
    parts = [part for tokens in found for part in np.array_split(np.asarray(tokens, kind), cut)]
    lengths = np.asarray([len(part) for part in parts], np.int32)
    offsets = np.asarray([0, *np.cumsum(lengths)[:-1]], np.int64) * np.dtype(kind).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(parts), len(found) + 1)
    bounds = np.arange(0, len(parts) + 1, cut, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + bounds.tobytes())
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize(("kind", "code", "cut"), [(np.uint16, 8, 1), (np.int32, 4, 2), (np.uint8, 1, 3)])
def test_megatrons_stores(tmp_path: Path, kind: Any, code: int, cut: int) -> None:
    """Rows of a store are those of the same documents as text; the last documents are held out."""
    found = texts(20)
    prefix = tmp_path / "part_text_document"
    megatrons(prefix, [[*text.encode(), 0] for text in found], kind, code, cut)
    (tmp_path / "a.txt").write_text("\n".join(found[:15]))
    training, heldout = stored(prefix, heldout_fraction=0.25, packing="documents")
    same, _ = opened(tmp_path, datasets=(str(tmp_path / "a.txt"),), heldout_fraction=0.0, packing="documents")
    assert same_rows(training, same)
    assert isinstance(heldout, Indexed)
    first = heldout.row(0)["tokens"].tolist()
    assert bytes(first) == found[15].encode()[: len(first)]
    assert training.fingerprint() != heldout.fingerprint()
    mixed, _ = stored(prefix, datasets=(str(tmp_path / "a.txt"),), weights=(1, 3))
    assert isinstance(mixed, Mixed)


ENDLESS_OR_LARGE = ([[1, 2], [3, 0]], [[1, 256, 0], [3, 0]])
"""Documents, of which one has no end, or a token beyond the vocabulary."""


def test_megatrons_stores_that_are_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "part"
    good = [[1, 2, 0], [3, 0]]
    megatrons(prefix, good)
    index = prefix.with_suffix(".idx").read_bytes()
    content = prefix.with_suffix(".bin").read_bytes()
    for written, message in (
        ((b"TNTIDX" + index[6:], content), "begins with"),
        ((index[:9] + b"\x02" + index[10:], content), "version 2"),
        ((index[:-8], content), "one after the other"),
        ((index[:-8] + index[-16:-8], content), "rising from 0"),
        ((index[:34] + b"\x04" + index[35:], content), "one after the other"),
        ((index, content[:-2]), "has 8 bytes, of another number"),
    ):
        for suffix, data in zip((".idx", ".bin"), written, strict=True):
            prefix.with_suffix(suffix).write_bytes(data)
        refused(prefix, message)
    for bad in ENDLESS_OR_LARGE:
        megatrons(prefix, bad)
        refused(prefix, r"below 256, and documents that end with 0, .* --append-eod")
    megatrons(prefix, [[], *good])
    refused(prefix, "part: expected documents of a token or more", packing="documents")
    refused(tmp_path / "none", r"none\.idx")
    refused(prefix, "there is no text", heldout_files=("a.txt",))


@pytest.mark.parametrize(("kind", "code"), [(np.uint16, 8), (np.int32, 4)])
@pytest.mark.parametrize(("bad", "says"), [([1, 256, 0], "token 256"), ([1, 2, 3], "token 3")])
def test_every_document_of_a_store_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, code: int, bad: list[int], says: str
) -> None:
    """Tokens beyond the vocabulary, and ends that are none, behind the first that go through the tokenizer together."""
    found = [[1, 2, 0]] * (AT_ONCE + 90)
    part = tmp_path / "part"
    megatrons(part, [*found[: AT_ONCE + 70], bad, *found], kind, code)
    refused(part, rf"part: {says} in document {AT_ONCE + 70}: expected tokens below 256, and ")
    megatrons(part, found, kind, code)
    first, _ = stored(part)
    monkeypatch.setattr("train.data.foreign._looked_at", lambda *_: 1 / 0)
    again, _ = stored(part)
    assert same_rows(first, again)


def same_rows(one: Rows, other: Rows) -> bool:
    assert isinstance(one, Indexed)
    assert isinstance(other, Indexed)
    assert one.count == other.count > 0
    return all(lists(one.row(i)) == lists(other.row(i)) for i in range(one.count))


# ---- pipelines

OWN = """
class Numbers:
    \"\"\"The protocol of torchdata's loaders, by hand.\"\"\"
    def __init__(self, seq_len, split, epoch, seed, most=9):
        self.at, self.make, self.most = 0, (lambda i: row(i, seq_len, split, epoch, seed)), most
    def __iter__(self):
        while self.at < self.most:
            self.at += 1
            yield self.make(self.at)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

def row(i, seq_len, split, epoch, seed):
    first = 7 * i + 31 * epoch + seed + (100 if split == "heldout" else 0)
    window = [(first + k) % 251 for k in range(seq_len + 1)]
    return {"tokens": window[:-1], "targets": window[1:]}

def rows(*, split, epoch, seed, seq_len):
    return Numbers(seq_len, split, epoch, seed)
"""

GRAIN = """
import grain
import numpy as np

class Source:
    def __init__(self, *what):
        self.what = what
    def __len__(self):
        return 11
    def __getitem__(self, i):
        return {name: np.asarray(each) for name, each in row(i, *self.what).items()}
    def __repr__(self):
        return "Source"

def numbered(*, split, epoch, seed, seq_len):
    return grain.MapDataset.source(Source(seq_len, split, 0, 0)).shuffle(seed=1000 * seed + epoch)

def in_order(**what):
    return numbered(**what).to_iter_dataset()

def batched(**what):
    return in_order(**what).batch(3)

def loaded(*, split, epoch, seed, seq_len):
    options = {"shuffle": True, "num_epochs": 1, "seed": 100 * seed + epoch}
    order = grain.samplers.IndexSampler(11, grain.sharding.NoSharding(), **options)
    return grain.DataLoader(data_source=Source(seq_len, split, 0, 0), sampler=order, worker_count=0)

def anonymous(*, split, epoch, seed, seq_len):
    class Anonymous(Source):
        __repr__ = object.__repr__
    return grain.DataLoader(
        data_source=Anonymous(seq_len, split, 0, 0),
        sampler=grain.samplers.IndexSampler(11, grain.sharding.NoSharding(), num_epochs=1, seed=1),
    )
"""

TORCHDATA = """
import torch
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

def rows_of(split, seq_len):
    return [{name: torch.tensor(each) for name, each in row(i, seq_len, split, 0, 0).items()} for i in range(11)]

def shuffled(workers, batch, *, split, epoch, seed, seq_len):
    order = torch.Generator().manual_seed(1000 * seed + epoch)
    found = rows_of(split, seq_len)
    return StatefulDataLoader(found, batch_size=batch, shuffle=True, generator=order, num_workers=workers)

def batched(**what):
    return shuffled(0, 3, **what)

def single(**what):
    return shuffled(0, None, **what)

def worked(**what):
    return shuffled(2, 3, **what)

def nodal(*, split, epoch, seed, seq_len):
    return nodes.Loader(nodes.IterableWrapper(rows_of(split, seq_len)))
"""


def pipeline(folder: Path, source: str, name: str, **settings: Any) -> Pipeline:
    (folder / "own.py").write_text(source if source.startswith(OWN) else OWN + source)
    settings = {"split": "training", "seq_len": 6, "packing": "stream", "vocab": 256} | settings
    return Pipeline("text", f"{folder}/own.py:{name}", **settings)


def by_hand(one: Pipeline, seed: int) -> Iterator[Row]:
    """The rows of one epoch after the other, as the library gives them."""
    for epoch in count():
        made = one._function(split="training", epoch=epoch, seed=seed, seq_len=one.seq_len)
        for element in made if not hasattr(made, "to_iter_dataset") else (made[i] for i in range(len(made))):
            yield from one.rows(element)


CASES = [
    (OWN, "rows", ""),
    *((GRAIN, name, "grain") for name in ("numbered", "in_order", "batched", "loaded")),
    *((TORCHDATA, name, "torchdata") for name in ("batched", "single", "worked", "nodal")),
]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # workers that are dropped as they begin
@pytest.mark.parametrize(("source", "name", "library"), CASES, ids=[f"{lib or 'own'}-{name}" for _, name, lib in CASES])
def test_pipelines_go_on_where_they_were_on_any_number_of_ranks(
    tmp_path: Path, source: str, name: str, library: str
) -> None:
    """Stopped at random steps, taken up by 1, 2 or 3 ranks, into the third epoch: the library's own order, without a
    row lost or read twice. States go through JSON."""
    if library:
        pytest.importorskip(library)
    one = pipeline(tmp_path, source, name)
    total = 33 if name != "worked" else 14  # processes take a while to begin
    expected = [lists(row) for row in islice(by_hand(one, seed=3), total)]
    assert stopped_and_taken_up(one, total, 4) == expected
    assert len({str(row) for row in expected[:11]}) == len({str(row) for row in expected[:9]}) + 2 or not library
    assert one.fingerprint() == pipeline(tmp_path, source, name).fingerprint()


def test_a_dataset_of_another_length_is_another_text(tmp_path: Path) -> None:
    """Another length has another order, so that a position would mean other rows."""
    pytest.importorskip("grain")
    one = pipeline(tmp_path, GRAIN, "numbered")
    (tmp_path / "own.py").write_text("HOW_MANY = 11\n" + OWN + GRAIN.replace("return 11", "return HOW_MANY"))
    many, few = (dataclasses.replace(one) for _ in range(2))
    few._function.__globals__["HOW_MANY"] = 9
    assert many.fingerprint() != few.fingerprint()


REUSING = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Rows(Numbers):
    seq_len: int
    dtype: str
    at: int = 0
    def __iter__(self):
        import numpy as np
        window = np.zeros(self.seq_len + 1, self.dtype)
        while self.at < 3:
            window[:] = range(self.at, self.at + self.seq_len + 1)
            self.at += 1
            yield {"tokens": window[:-1], "targets": window[1:]}
"""


@pytest.mark.parametrize("dtype", ["int64", "uint16", "uint32"])
def test_rows_are_copies_of_what_a_pipeline_gives(tmp_path: Path, dtype: str) -> None:
    """One that writes each row over the one before, in a file whose dataclass has annotations that are text."""
    made = f"def rows(*, split, epoch, seed, seq_len):\n    return Rows(seq_len, '{dtype}')\n"
    source = f"from __future__ import annotations\n{OWN}{REUSING.partition('annotations')[2]}{made}"
    (tmp_path / "datasets.py").write_text(source)
    one = Pipeline("text", f"{tmp_path}/datasets.py:rows", "training", 6, "stream", 256)
    cursor = one.cursor(0, seed=0)
    assert [lists(cursor.next() or {})["tokens"] for _ in range(4)] == [[*range(n, n + 6)] for n in (0, 1, 2, 0)]


def test_states_go_through_json() -> None:
    generator = torch.Generator().manual_seed(3).get_state()
    state = {
        "bytes": b"\0\xff", "generator": generator, "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "list": [True, 0.5, "x"], "halves": torch.randn(2, 3).bfloat16(),
    }  # fmt: skip
    found = from_json(json.loads(json.dumps(to_json(state))))
    assert found.keys() == state.keys()
    for name in ("bytes", "list"):
        assert found[name] == state[name]
    assert torch.equal(found["halves"], state["halves"])
    assert found["halves"].dtype == torch.bfloat16
    assert torch.equal(found["generator"], generator)
    assert found["none"].shape == (0, 3)
    assert found["none"].dtype == torch.bfloat16
    for bad, message in (
        ({"a": [object]}, r"its state\.a\[0\] is a type: checkpoints keep JSON, bytes and tensors"),
        ({1: 2}, "its state is a dict with keys that are no text or begin with #: checkpoints keep"),
        ({"a": (1, 2)}, r"its state\.a is a tuple: checkpoints keep JSON, bytes and tensors"),
        (f"{object()}", "has an address in memory, .*: give that object a __repr__"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_json(bad)


BAD = """
class Bad(Numbers):
    def __init__(self, what):
        self.at, self.most, self.make = 0, 9, lambda i: what
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1, 2]", "it is a list, which cannot say where it is: expected grain's MapDataset"),
        ("None", "it is None; for no evaluation, --eval-every 0"),
        ("1 / 0", "it cannot be made: ZeroDivisionError: division by zero"),
        ("Numbers(seq_len, split, epoch, seed, 0)", "training: it gives no rows"),
        ("Numbers(seq_len + 1, split, epoch, seed)", r"\{'tokens': \(7,\).*expected \[6\] each, or \[n, 6\]"),
        ("Bad({'tokens': [300] * 6, 'targets': [0] * 6})", r"tokens 300 to 300, .* are below 256, and -100"),
        ("Bad({'tokens': [0] * 6})", r"it gives \['tokens'\]: expected a dict of tokens, targets, as data.packing is"),
        ("Bad({'tokens': [.5] * 6, 'targets': [0] * 6})", "torch.float64, torch.int64: expected integers"),
        ("Bad(3)", "it gives int: expected a dict"),
    ],
)
def test_pipelines_that_are_refused(tmp_path: Path, body: str, message: str) -> None:
    source = f"{OWN}\n{BAD}\ndef f(*, split, epoch, seed, seq_len):\n    return {body}\n"
    with pytest.raises(ConfigError, match=message) as caught:
        pipeline(tmp_path, source, "f").fingerprint()
    assert str(caught.value).startswith(f"data.pipelines {tmp_path}/own.py:f, training: ")


def test_a_state_that_names_an_address_is_refused(tmp_path: Path) -> None:
    """Grain goes on with the same repr alone, and that of an object without one is another in each process."""
    pytest.importorskip("grain")
    with pytest.raises(ConfigError, match=r"has an address in memory, .*Anonymous object at 0x"):
        pipeline(tmp_path, GRAIN, "anonymous").cursor(0, 0).next()


def test_positions_that_are_refused(tmp_path: Path) -> None:
    one = pipeline(tmp_path, OWN, "rows")
    for bad in (3, {"place": [0, None]}, {"place": [-1, None, 0]}, {"place": [0, None, "x"]}, {"rows": 0}):
        with pytest.raises(ConfigError, match=r"expected (a |an |0 to )"):
            one.cursor(bad, 0)
    with pytest.raises(ConfigError, match=r"rows, training: it cannot be gone on with from the checkpoint: KeyError"):
        one.cursor({"place": [0, {"x": 0}, 0]}, 0).next()
    with pytest.raises(ConfigError, match="behind the rows that it gives"):
        one.cursor({"place": [0, {"at": 2}, 4]}, 0).next()


def test_pipelines_are_sources_like_others(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    _, heldout = opened(tmp_path, 5, pipelines=(f"{tmp_path}/own.py:rows",))
    assert isinstance(heldout, Indexed)
    assert heldout.count == 5
    assert heldout.row(0)["tokens"].tolist() == [107, 108, 109, 110]
    _, all_of_it = opened(tmp_path, 50, pipelines=(f"{tmp_path}/own.py:rows",))
    assert isinstance(all_of_it, Indexed) and all_of_it.count == 9, "an epoch"
    (tmp_path / "a.md").write_text("plain text " * 40)
    mixed, _ = opened(tmp_path, 0, pipelines=(f"{tmp_path}/own.py:rows",), files=(f"{tmp_path}/a.md",), weights=(1, 1))
    assert isinstance(mixed, Mixed)
    rows, _ = rows_of(mixed, 0, 1, 2, 20, read_ahead=False)
    first, position = rows_of(mixed, 0, 2, 1, 7, read_ahead=True)
    assert [*map(lists, first + rows_of(mixed, position, 1, 1, 26, read_ahead=False)[0])] == [*map(lists, rows)]
    with pytest.raises(ConfigError, match=r"data.pipelines is 'rows': expected FILE.py:NAME"):
        Data(pipelines=("rows",))


# ---- runs


def together(ranks: Sequence[Run], steps: int) -> list[str]:
    """The rows of the first steps, of all ranks, in their order."""
    return [row for step in range(steps) for one in ranks for row in one.read[step]]


def piped(folder: Path, source: str, *more: str) -> tuple[str, ...]:
    (folder / "own.py").write_text(source)
    return without(flags(folder, "--data.pipelines", f"{folder}/own.py:rows", *more), "--data.files")


def test_a_run_on_a_pipeline_goes_on_with_other_ranks(pools: Pools, tmp_path: Path) -> None:
    argv = piped(tmp_path, OWN)
    two = pools[2].run(inside, argv, killed, 7)
    assert {one.error for one in two} == {"Killed: "}
    (one,) = pools[1].run(inside, (*argv, "--resume", "--steps", "8"))
    assert one.error == ""
    read = together(two, 4) + together([one], len(one.read))
    expected = by_hand(pipeline(tmp_path, OWN, "rows", seq_len=WINDOW), seed=0)
    assert read == ["".join(map(chr, row["tokens"].tolist())) for row in islice(expected, len(read))]
    assert len(read) == 24
    # another file is another text
    (changed,) = pools[1].run(inside, (*piped(tmp_path, OWN.replace("7 * i", "8 * i")), "--resume", "--steps", "9"))
    assert "--resume: the text is not that of the run" in changed.error


def test_a_pipeline_that_deals_out_rows_itself_is_refused(pools: Pools, tmp_path: Path) -> None:
    source = f"""{OWN}
import os
def rows(*, split, epoch, seed, seq_len):
    return Numbers(seq_len, split, epoch, seed + int(os.environ["RANK"]))
"""
    for one in pools[2].run(inside, piped(tmp_path, source)):
        assert "ranks were started differently" in one.error
        assert "content of the training text: " in one.error


def test_a_config_of_others_runs_no_pipeline(tmp_path: Path) -> None:
    named = f"{tmp_path}/evil.py:f"
    of_others(tmp_path, data={"pipelines": [named]})
    with pytest.raises(ConfigError, match=rf"only the command line does, --data.pipelines {named}"):
        resumed(tmp_path)
    assert resumed(tmp_path, "--data.pipelines", named).data.pipelines == (named,)
