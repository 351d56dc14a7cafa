"""Checkpoints that were damaged, or made to do harm: found or refused by name, and nothing of them is run.

By default a sample; FUZZ=all tries 10,000 inputs of each kind.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import fresh, same, stepped, whole
from tests.harness.damage import byte_damage, json_damage
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint import CheckpointError
from yafsdp_fn.checkpoint.content import MANIFEST
from yafsdp_fn.checkpoint.folder import SUMS, AllRanks, Damaged, verify, write

ALL = os.environ.get("FUZZ") == "all"
FIRST = "rank-00000.safetensors"


def saved(mesh: Any, directory: Path) -> Path:
    return checkpoint.save(directory, stepped(fresh(mesh), 1), {"position": 17})


def load(mesh: Any, directory: Path) -> tuple[ya.ShardedState, dict[str, Any]]:
    return checkpoint.load(directory, fresh(mesh, seed=1), step=1)


def flip(file: Path, bit: int) -> None:
    """In place: a file that is written anew may have to reach the disk first."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


@on_ranks(1)
def test_every_flipped_bit_of_a_thousand_is_found(mesh: Any, tmp_path: Path) -> None:
    folder = saved(mesh, tmp_path)
    draw = random.Random(0)
    files = sorted(path for path in folder.iterdir())
    assert len(files) == 3
    for number in range(1000):
        file = files[number % len(files)]
        bit = draw.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(Damaged):
            verify(folder, AllRanks())
        flip(file, bit)
    verify(folder, AllRanks())


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.write_text, (self.proof, "run")


@on_ranks(1)
def test_a_pickle_is_never_opened_as_one(mesh: Any, tmp_path: Path) -> None:
    """A pickle under every name that torch, or an earlier version, would open one by; whole, and in place of a file."""
    folder = saved(mesh, tmp_path)
    proof = tmp_path / "proof"
    text = pickle.dumps(Payload(proof))
    for name in (".metadata", "__0_0.distcp", "rank-00009.safetensors", "manifest.pkl"):
        (folder / name).write_bytes(text)
        with pytest.raises(Damaged, match=f"holds {re.escape(name)}, which was not written with it"):
            load(mesh, tmp_path)
        resummed(folder)
        if name.endswith(".safetensors"):
            with pytest.raises(CheckpointError, match=r"rank-00009\.safetensors cannot be read"):
                load(mesh, tmp_path)
        else:
            load(mesh, tmp_path)
        (folder / name).unlink()
        resummed(folder)
    (folder / FIRST).write_bytes(text)
    resummed(folder)
    for find in (checkpoint.load, checkpoint.load_params):
        with pytest.raises(CheckpointError, match=rf"{FIRST} cannot be read"):
            find(tmp_path, fresh(mesh))
    assert not proof.exists()


@on_ranks(1)
def test_checkpoints_of_earlier_versions_are_refused_by_a_sentence(mesh: Any, tmp_path: Path) -> None:
    folder = saved(mesh, tmp_path)
    facts = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**facts, "format": 2}))
    resummed(folder)
    with pytest.raises(CheckpointError, match=r"format 2, expected 3; go on with the version"):
        load(mesh, tmp_path)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the header of a file of safetensors; its numbers stay."""

    def edit(file: Path) -> None:
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        of = json.loads(data[8 : 8 + length])
        change(of)
        text = json.dumps(of).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def first(of: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in of.items() if key.startswith("params.") and "," in key)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    """old, new: the offsets of all parts called so"""

    def change(of: dict[str, Any]) -> None:
        for key in [key for key in of if key.endswith(old)]:
            of[key.removesuffix(old) + new] = of.pop(key)

    return change


CANNOT = r"rank-00000\.safetensors cannot be read"
EDITS = {
    "beyond": (header(lambda of: first(of).update(data_offsets=[0, 2**40])), CANNOT),
    "negative": (header(lambda of: first(of).update(data_offsets=[-8, 0])), CANNOT),
    "overlap": (header(lambda of: first(of).update(data_offsets=[0, 4])), CANNOT),
    "huge": (header(lambda of: first(of).update(shape=[2**62, 2**62])), CANNOT),
    "deep": (lambda file: file.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000), CANNOT),
    "long": (lambda file: file.write_bytes(struct.pack("<Q", 2**60) + b"{}"), CANNOT),
    "dtype": (header(lambda of: first(of).update(dtype="F8_E4M3")), r"cannot be read|expected the key and the offsets"),
    "name": (header(renamed("@0,0", "@zero")), r"@zero' .*: expected the key and the offsets of a part"),
    "number": (header(renamed("@0,0", "@" + "9" * 40 + ",0")), r"expected the key and the offsets of a part"),
    "moved": (header(renamed("@0,0", "@0,1")), r"parts in rank-00000\.safetensors do not make up a tensor of shape"),
    "fewer": (header(renamed("@0,0", "@0")), r"expected the key and the offsets of a part"),
    "none": (lambda file: file.unlink(), r"its 0 parts in no file do not make up a tensor"),
}


@on_ranks(1)
@pytest.mark.parametrize("kind", EDITS)
def test_figures_and_names_are_checked_before_they_are_used(mesh: Any, tmp_path: Path, kind: str) -> None:
    folder = saved(mesh, tmp_path)
    change, text = EDITS[kind]
    change(folder / FIRST)
    resummed(folder)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(mesh, tmp_path)
    assert len(str(caught.value)) < 1000


@on_ranks(1)
def test_links_are_not_followed(mesh: Any, tmp_path: Path) -> None:
    folder = saved(mesh, tmp_path)
    outside = (folder / FIRST).rename(tmp_path / "outside")
    (folder / FIRST).symlink_to(outside)
    resummed(folder)
    with pytest.raises(CheckpointError, match=rf"{FIRST} is missing"):
        verify(folder, AllRanks())


def resummed(folder: Path) -> None:
    (folder / SUMS).unlink(missing_ok=True)
    write(folder, AllRanks())


TOKENS = (b"\xff\xff\xff\x7f", b"9" * 30, b"null", b"[" * 2000, b"1e400", b"0", b"-")
"""Of JSON, and of bytes: lengths and numbers."""


def changed(data: bytes, draw: random.Random, others: list[bytes], *, of_json: bool) -> bytes:
    kind = draw.randrange(4)
    if of_json and kind < 2:
        return json_damage(json.loads(data), draw)
    at = draw.randrange(len(data))
    if kind == 2:
        return data[:at] + draw.choice(TOKENS) + data[at + draw.randrange(2) :]
    if kind == 3:
        other = draw.choice(others)
        return data[:at] + other[draw.randrange(len(other)) :]
    return byte_damage(data, draw)


def fuzzed(mesh: Any, directory: Path, name: str, count: int) -> Counter[str]:
    folder = saved(mesh, directory)
    state, _ = load(mesh, directory)
    good = whole(state)
    outcomes = Counter[str]()
    draw = random.Random(name)
    file = folder / name
    data = file.read_bytes()
    begin = len(data) if name == MANIFEST else 8 + struct.unpack("<Q", data[:8])[0]  # of the numbers
    others = [path.read_bytes() for path in folder.iterdir()]
    load(mesh, directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        # numbers that have changed are other numbers, with digests made anew
        file.write_bytes(changed(data[:begin], draw, others, of_json=name == MANIFEST) + data[begin:])
        resummed(folder)
        try:
            state, extra = load(mesh, directory)
        except CheckpointError as error:
            assert str(folder) in str(error), error
            outcomes["refused"] += 1
            continue
        assert isinstance(extra, dict)
        assert same(whole(state), good), number
        outcomes["the same state"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60 << 10, f"{grown >> 10} MiB"
    return outcomes


@pytest.mark.parametrize("name", ["manifest.json", FIRST])
def test_fuzzed(pools: Pools, tmp_path: Path, name: str) -> None:
    """The digests are made anew, so that what is behind them is reached."""
    outcomes = pools[1].run(fuzzed, tmp_path, name, 10_000 if ALL else 150, timeout=900)[0]
    print(name, dict(outcomes))
    assert outcomes["refused"] > 10
