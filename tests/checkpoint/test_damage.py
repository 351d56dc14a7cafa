"""Checkpoints that were damaged, or made to do harm: found or refused by name, and nothing of them is run.

By default a sample; FUZZ=all tries 10,000 inputs of each kind.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import TX, Pools, net, same, stepped, whole
from tests.harness.damage import byte_damage, json_damage
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint import pickles
from yafsdp_fn.checkpoint.folder import SUMS, AllRanks, Damaged, verify, write

ALL = os.environ.get("FUZZ") == "all"
NAME = "step-00000001"


def saved(mesh: Any, directory: str) -> Path:
    return checkpoint.save(directory, stepped(ya.init(net(), TX, mesh=mesh), 1), {"position": 17})


def load(mesh: Any, directory: Path) -> tuple[ya.ShardedState, dict[str, Any]]:
    return checkpoint.load(directory, ya.init(net(), TX, mesh=mesh, seed=1), step=1)


def flip(file: Path, bit: int) -> None:
    """In place: a file that is written anew may have to reach the disk first."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def finds_flips(mesh: Any, directory: str) -> None:
    folder, draw = saved(mesh, directory), random.Random(0)
    files = sorted(path for path in folder.iterdir())
    assert len(files) == 4
    for number in range(1000):
        file = files[number % len(files)]
        bit = draw.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(Damaged):
            verify(folder, AllRanks())
        flip(file, bit)
    verify(folder, AllRanks())


def test_every_flipped_bit_of_a_thousand_is_found(pools: Pools, tmp_path: Path) -> None:
    pools[1].run(finds_flips, str(tmp_path))


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.write_text, (self.proof, "run")


def in_planner_data(folder: Path, payload: Payload) -> None:
    edit_metadata(folder, lambda index: setattr(index, "planner_data", payload))


def as_bytes(folder: Path, payload: Payload) -> None:
    """In place of a tensor a pickled object, which torch's reader unpickles."""

    def change(index: Any) -> None:
        name = next(iter(index.state_dict_metadata))
        place = next(place for key, place in index.storage_data.items() if key.fqn == name)
        index.state_dict_metadata[name] = BytesStorageMetadata()
        text = pickle.dumps(payload)
        file = folder / place.relative_path
        place.offset, place.length = file.stat().st_size, len(text)
        index.storage_data = {MetadataIndex(name): place, **index.storage_data}
        file.write_bytes(file.read_bytes() + text)

    edit_metadata(folder, change)


def in_a_tensor(folder: Path, payload: Payload) -> None:
    def change(archive: dict[str, bytes]) -> None:
        archive["data.pkl"] = pickle.dumps(payload, protocol=2)

    edit_tensor(folder, change)


def edit_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def edit_tensor(folder: Path, change: Callable[[dict[str, bytes]], object], kind: int = zipfile.ZIP_STORED) -> None:
    """Writes the first tensor of a file anew, at its end."""

    def move(index: Any) -> None:
        place = next(iter(index.storage_data.values()))
        file = folder / place.relative_path
        data = file.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data[place.offset :][: place.length])) as archive:
            records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        change(records)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", kind) as archive:
            for name, record in records.items():
                archive.writestr(f"archive/{name}", record)
        place.offset, place.length = len(data), len(out.getvalue())
        file.write_bytes(data + out.getvalue())

    edit_metadata(folder, move)


def resummed(folder: Path) -> None:
    (folder / SUMS).unlink(missing_ok=True)
    write(folder, AllRanks())


def is_refused(mesh: Any, directory: str, harm: Callable[[Path, Payload], None], text: str) -> None:
    folder, payload = saved(mesh, directory), Payload(Path(directory) / "proof")
    harm(folder, payload)
    resummed(folder)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        load(mesh, Path(directory))
    assert not payload.proof.exists()
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load_params(directory, ya.init(net(), ya.optim.identity(), mesh=mesh))
    assert not payload.proof.exists()


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (in_planner_data, r"\.metadata cannot be read: .*it asks for pathlib.*write_text, which could run anything"),
        (as_bytes, r"is None, expected"),
        (in_a_tensor, r"is damaged: .*it asks for .*getattr, which could run anything"),
    ],
)
def test_what_would_run_is_refused(pools: Pools, tmp_path: Path, harm: Any, text: str) -> None:
    pools[1].run(is_refused, str(tmp_path), harm, text)


def set_on_a_class(folder: Path) -> None:
    """An index that sets an attribute of a class of the process before it says anything else."""
    path = folder / ".metadata"
    text = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    state = b"N}X\x04\0\0\0_strX\x07\0\0\0/victims\x86"  # (None, {"_str": "/victim"})
    path.write_bytes(text[:2] + b"cpathlib\nPosixPath\n" + state + b"b0" + text[2:])


def leaves_the_process_alone(mesh: Any, directory: str, named: bool) -> None:
    if named:
        folder = Path(directory) / "named"
        checkpoint.save_named(folder, ya.init(net(), TX, mesh=mesh).params, lambda path, layer: f"{path} {layer}")
    else:
        folder = saved(mesh, directory)
    set_on_a_class(folder)
    if not named:
        resummed(folder)
    kinds = (PurePath, PurePosixPath)
    before = [dict(vars(kind)) for kind in kinds]
    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata cannot be read: .*it changes a"):
            if named:
                checkpoint.load_named(folder, net(), lambda path, layer: f"{path} {layer}")
            else:
                load(mesh, Path(directory))
        changed = [dict(vars(kind)) for kind in kinds] != before
    finally:
        for kind, attributes in zip(kinds, before, strict=True):
            if "_str" in attributes:
                kind._str = attributes["_str"]  # type: ignore[attr-defined]
            elif "_str" in vars(kind):
                del kind._str  # type: ignore[attr-defined]
    assert not changed, "every path of the process is another one"


@pytest.mark.parametrize("named", [False, True])
def test_no_class_of_the_process_is_changed(pools: Pools, tmp_path: Path, named: bool) -> None:
    pools[1].run(leaves_the_process_alone, str(tmp_path), named)


@pytest.mark.parametrize("harm", ["class", "enum member", "function", "attribute of torch"])
def test_unpickling_touches_nothing(harm: str) -> None:
    text = {
        "class": b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\0\0\0xK\x01s\x86b.",
        "enum member": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R}X\x01\0\0\0xK\x01sb.",
        "function": b"ctorch.serialization\n_get_layout\n}X\x01\0\0\0xK\x01sb.",
        "attribute of torch": b"ctorch\n_dynamo\n.",
    }[harm]
    member = metadata._MEM_FORMAT_ENCODING(0)
    with pytest.raises(ValueError):
        pickles.read_metadata(b"\x80\x02" + text)
    assert not any(hasattr(each, "x") for each in (metadata.Metadata, member, torch.serialization._get_layout))


def nested(depth: int = 60) -> Any:
    """A list of 2**60 numbers, in some hundred bytes."""
    found: Any = [0]
    for _ in range(depth):
        found = [found, found]
    return found


def tuples(depth: int = 60) -> Any:
    found: Any = (0,)
    for _ in range(depth):
        found = (found, found)
    return found


NESTS: dict[str, Callable[[Any], object]] = {
    "where a part begins": lambda i: places(i, lambda p: setattr(p, "offset", nested())),
    "its file": lambda i: places(i, lambda p: setattr(p, "relative_path", nested())),
    "shape": lambda i: setattr(next(iter(i.state_dict_metadata.values())), "size", nested()),
    "parts": lambda i: setattr(next(iter(i.state_dict_metadata.values())), "chunks", nested()),
    "a part": lambda i: setattr(next(iter(i.state_dict_metadata.values())), "chunks", [nested()]),
    "name": lambda i: i.storage_data.update({Key(tuples()): 0}),
    "all": lambda i: setattr(i, "state_dict_metadata", nested()),
}


class Key:
    """A key of a table, which torch's own reader would hash for ever."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return torch.Size, (self.value,)


def is_answered_at_once(mesh: Any, directory: str, kind: str) -> None:
    folder = saved(mesh, directory)
    edit_metadata(folder, NESTS[kind])
    resummed(folder)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata.*") as caught:
        load(mesh, Path(directory))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", NESTS)
def test_a_nest_of_lists_is_refused_and_not_walked(pools: Pools, tmp_path: Path, kind: str) -> None:
    pools[1].run(is_answered_at_once, str(tmp_path), kind)


def test_a_nest_of_tuples_in_a_tensor_is_refused_and_not_walked() -> None:
    out = io.BytesIO()
    torch.save(torch.ones(3), out)
    with zipfile.ZipFile(out) as archive:
        good = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    nest = b"K\0\x85" + b"2\x86" * 60  # DUP, a pair of both
    memo = b"K\0\x85" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(20, 80))
    for old, new in ((b"X\x01\0\0\0000", memo), (b"K\x03\x85", memo), (b"K\x01\x85", memo), (b"K\x03\x85", nest)):
        assert old in good["data.pkl"], old
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, record in good.items():
                archive.writestr(f"archive/{name}", record.replace(old, new, 1) if name == "data.pkl" else record)
        with pytest.raises(ValueError) as caught:
            pickles.read_tensor(file.getvalue(), torch.float32, (3,))
        assert len(str(caught.value)) < 300
    same = pickles.read_tensor(out.getvalue(), torch.float32, (3,))
    assert torch.equal(same, torch.ones(3))


def places(index: Any, change: Callable[[Any], object]) -> None:
    change(next(iter(index.storage_data.values())))


def larger(index: Any) -> None:
    of = next(iter(index.state_dict_metadata.values()))
    of.size = torch.Size([*of.size[:-1], 2**50])


def overlapping(index: Any) -> None:
    of = next(of for of in index.state_dict_metadata.values() if len(of.size) == 2)
    of.chunks = [*of.chunks, of.chunks[0]]


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "out": (
        lambda i: places(i, lambda p: setattr(p, "relative_path", "../secret")),
        r"'\.\./secret': expected the name",
    ),
    "root": (lambda i: places(i, lambda p: setattr(p, "relative_path", "/etc/passwd")), r"'/etc/passwd': expected the"),
    "beyond": (lambda i: places(i, lambda p: setattr(p, "offset", 2**40)), r"bytes; bytes 1,099,511,627,776 to"),
    "negative": (lambda i: places(i, lambda p: setattr(p, "offset", -1)), r"expected numbers of elements or bytes"),
    "huge": (lambda i: places(i, lambda p: setattr(p, "offset", 2**2000)), r"expected numbers of elements or bytes"),
    "text": (lambda i: places(i, lambda p: setattr(p, "length", "9")), r"expected numbers of elements or bytes"),
    "codec": (lambda i: places(i, lambda p: setattr(p, "transform_descriptors", ["zstd"])), r"stored transformed"),
    "larger": (larger, r"parts do not make up a tensor of shape"),
    "overlap": (overlapping, r"parts do not make up a tensor of shape"),
    "nowhere": (lambda i: i.storage_data.clear(), r"nothing says where its part"),
    "none": (lambda i: setattr(i, "storage_data", None), r"expected tables of tensors"),
}


def edited(mesh: Any, directory: str, kind: str) -> None:
    folder = saved(mesh, directory)
    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    change, text = EDITS[kind]
    edit_metadata(folder, change)
    resummed(folder)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        load(mesh, Path(directory))


def test_figures_and_names_are_checked_before_they_are_used(pools: Pools, tmp_path: Path) -> None:
    for kind in EDITS:
        pools[1].run(edited, str(tmp_path / kind), kind)


def compressed(mesh: Any, directory: str) -> None:
    """A thousand times as large as its file."""
    folder = saved(mesh, directory)
    edit_tensor(folder, lambda records: None, zipfile.ZIP_DEFLATED)
    resummed(folder)
    with pytest.raises(checkpoint.CheckpointError, match=r"there is no plain record"):
        load(mesh, Path(directory))
    linked = shutil.copytree(saved(mesh, directory + "2"), Path(directory) / "step-00000009")
    (Path(directory) / "outside").write_bytes((linked / "__0_0.distcp").read_bytes())
    (linked / "__0_0.distcp").unlink()
    (linked / "__0_0.distcp").symlink_to(Path(directory) / "outside")
    resummed(linked)
    with pytest.raises(checkpoint.CheckpointError, match=r"__0_0\.distcp is missing"):
        verify(linked, AllRanks())


def test_nothing_compressed_and_no_links(pools: Pools, tmp_path: Path) -> None:
    pools[1].run(compressed, str(tmp_path))


TOKENS = (b"\xff\xff\xff\x7f", b"9" * 30, b"null", b"[" * 2000, b"1e400", b"0", b"-", b"r", b"\x8a", b"R", b"c", b".")
"""Of JSON and of pickles: lengths, numbers, and operations that build and call."""


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


def fuzzed(mesh: Any, directory: str, name: str, count: int) -> Counter[str]:
    folder = saved(mesh, directory)
    state, _ = load(mesh, Path(directory))
    good, outcomes, draw = whole(state), Counter[str](), random.Random(name)
    file = folder / name
    data = file.read_bytes()
    others = [data, *(path.read_bytes() for path in folder.iterdir())]
    load(mesh, Path(directory))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        file.write_bytes(changed(data, draw, others, of_json=name == "manifest.json"))
        resummed(folder)
        try:
            state, extra = load(mesh, Path(directory))
        except checkpoint.CheckpointError as error:
            assert str(folder) in str(error), error
            outcomes["refused"] += 1
            continue
        assert isinstance(extra, dict)
        assert same(whole(state), good), number
        outcomes["the same state"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60 << 10, f"{grown >> 10} MiB"
    return outcomes


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0_0.distcp"])
def test_fuzzed(pools: Pools, tmp_path: Path, name: str) -> None:
    """The digests are made anew, so that what is behind them is reached."""
    outcomes = pools[1].run(fuzzed, str(tmp_path), name, 10_000 if ALL else 150, timeout=900)[0]
    print(name, dict(outcomes))
    assert outcomes["refused"] > 10


def test_unpickling_makes_room_for_nothing_that_is_not_there() -> None:
    for text in (
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    ):
        with pytest.raises(ValueError, match=r"Error|it holds a list"):
            pickles.read_metadata(text)
