"""publish_weights: writes a trainer's shards to files, of which `pull_weights` takes what a generator needs.

    publish = ya.publish_weights("/dev/shm/run", dtype=torch.bfloat16)       # on every rank of the trainer
    publish(state.params, state.step)                                        # nothing is gathered, nobody is waited for

    pull = ya.pull_weights("/dev/shm/run", {"layers.0.wq": qkv[:64], ...})   # in the generator
    step = pull()                                                            # in place, all of one step

    rank 0's file:   stamp, head | layers.0 |-- wq --|- wk |        one for each version; the head says which boxes of
    rank 1's file:   stamp, head | layers.0 | wk |-- w_up -|        which leaves these flat shards are

A file appears when it is whole, and each rank keeps its two newest. When a rank begins version 7, all ranks have ended
6, since there is a step between: a reader always finds a version that is whole. It locks the files that it reads; a
rank writes over its oldest file if nobody has locked it, since new memory costs more than the copy, else into a new
one. Nobody waits, and who ends while holding a lock has released it.
"""

import functools
import itertools
import json
import math
import os
import re
import secrets
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.dist.communicators import Communicators
from yafsdp_fn.dist.ranks import Ranks, round_up
from yafsdp_fn.named_weights import checked
from yafsdp_fn.nn.low_rank import Part
from yafsdp_fn.params.layout import Entry, Group, cut_of
from yafsdp_fn.params.sharded import Sharded
from yafsdp_fn.params.tree import Tree, dotted, join, shape_of
from yafsdp_fn.util import disk

# ---- Boxes: a flat range of a leaf is a few of them.
#
#     leaf [3, 4], elements 2 to 9        . . 2 3     [0:1, 2:4]
#                                         4 5 6 7     [1:2, 0:4]
#                                         8 . . .     [2:3, 0:1]

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements of a leaf, `sizes` from `offsets` on, that lie from `at` on (bytes, in files), `strides` elements
    apart."""

    at: int
    offsets: Shape
    sizes: Shape
    strides: Shape


def boxes(shape: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
    """Yields `(offsets, sizes)` of boxes that make up the elements `[low, high)` of a tensor, in their order."""
    row = math.prod(shape[1:])
    while low < high:
        number, begin = divmod(low, row)
        if not shape:
            yield (), ()
            return
        if begin == 0 and high - low >= row:
            yield (number, *[0] * (len(shape) - 1)), ((high - low) // row, *shape[1:])
            low = high - (high - low) % row
        else:
            end = min(high - number * row, row)
            for offsets, sizes in boxes(shape[1:], begin, end):
                yield (number, *offsets), (1, *sizes)
            low = number * row + end


def within(box: Box, ranges: Sequence[range], itemsize: int = 1) -> Box | None:
    """Returns what of a box lies in `ranges`, one for each dimension, or None. itemsize: of `at`'s unit"""
    at, offsets, sizes = box.at, [], []
    for offset, size, stride, among in zip(box.offsets, box.sizes, box.strides, ranges, strict=True):
        begin, end = max(offset, among.start), min(offset + size, among.stop)
        if begin >= end:
            return None
        at += itemsize * stride * (begin - offset)
        offsets.append(begin)
        sizes.append(end - begin)
    return Box(at, tuple(offsets), tuple(sizes), box.strides)


Runs = list[list[tuple[range, int]]]
"""Runs along each dimension: a range of this rank's part, and how much further it lies in the whole."""


def _runs(group: Group, number: int, shape: Shape, ranks: Ranks) -> Runs:
    """Returns the runs of leaf `number`; shape: whole, of one layer."""
    out = []
    for dim, length in enumerate(shape, -len(shape)):
        index = torch.arange(length)
        for name, size in group.axes:
            cut, blocks = cut_of(group.splits[number], name)
            if dim == cut:
                index = index.view(blocks, size, -1)[:, ranks.axes[name].place].flatten()
        edges = [0, *(torch.nonzero(index.diff() != 1).flatten() + 1).tolist(), len(index)]
        out.append([(range(a, b), int(index[a]) - a) for a, b in itertools.pairwise(edges) if a < b])
    return out


def _of_whole(box: Box, runs: Runs) -> Iterator[Box]:
    """Yields the boxes of a whole leaf that are one box of this rank's part."""
    for each in itertools.product(*runs):
        if (found := within(box, [run for run, _ in each])) is not None:
            further = (offset + by for offset, (_, by) in zip(found.offsets, each, strict=True))
            yield found._replace(offsets=tuple(further))


def names_of(entry: Entry) -> list[str]:
    """Returns the paths of an entry's leaves inside of it. The weight that has an adapter is no longer the matrix, and
    has a name of its own."""
    out = []
    for accessor in entry.spec.accessors():
        base = bool(accessor) and isinstance(accessor[-1], Part) and accessor[-1].entry == "weight"
        out.append(join(dotted(accessor), "weight" if base else ""))
    return out


def _leaves(handle: Sharded, group: Group, place: int, n: int) -> Iterator[tuple[str, Shape, list[Box]]]:
    """Yields `(name, whole shape, boxes)` for each leaf of unit number `place`, of what is in this rank's shard [n];
    `at` in elements."""
    ranks, entry, names = handle.owner.comms, handle.entry, names_of(handle.entry)
    start = n * ranks.within(group.over).rank
    for number, position in enumerate(group.leaves):
        shape, offset, whole = group.layout.shapes[number], group.layout.offsets[number], group.layer_shapes[number]
        layers = range(shape[0]) if group.pinned else [place]
        shape = shape[1:] if group.pinned else shape
        runs, size = _runs(group, number, whole, ranks), math.prod(shape)
        for begin, layer in zip(itertools.count(offset, size), layers, strict=False):
            found, at = list[Box](), max(begin - start, 0)
            for offsets, sizes in boxes(shape, max(start - begin, 0), min(start + n - begin, size)):
                strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
                found += _of_whole(Box(at, offsets, sizes, strides), runs)
                at += math.prod(sizes)
            yield join(entry.name, "" if entry.length is None else str(layer), names[position]), whole, found


# ---- Files: a stamp, a head, and shards.

FORMAT = 1
MAGIC = b"yaweight"
STAMP = struct.Struct("<8sQqqIQI")
"""Magic, run, version, version of the frozen leaves that go with it or -1; the machine as a CRC-32; bytes of the head,
and their CRC-32."""
NAME = re.compile(r"([0-9a-f]{16})\.(\d{1,18})\.(\d{1,9})-of-(\d{1,9})(\.frozen)?(\.partial)?")
"""Run, version, rank and ranks."""


@functools.cache
def machine() -> str:
    """Names this machine since it was started. Files that are used again can be mapped on one alone."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


def begin_of(head: int) -> int:
    """Returns where shards begin behind a head of so many bytes."""
    return round_up(STAMP.size + head, 64)


class Section(NamedTuple):
    """Rows of a leaf of a handle, [rows, n], from byte `at` of the shards on."""

    handle: int
    leaf: int
    rows: tuple[int, ...]
    n: int
    dtype: torch.dtype
    at: int


class Plan(NamedTuple):
    """A rank's file: its head, JSON, and the sections behind it, so many bytes of them.

    head: {"format": 1, "leaves": {"layers.3.w": [dtype, whole shape, boxes]}}
    """

    head: bytes
    sections: list[Section]
    nbytes: int


def plan(handles: Sequence[Sharded], frozen: bool, dtype: torch.dtype | None) -> Plan:
    """Plans the file of all trained groups, or of all frozen ones."""
    sections, leaves, at = list[Section](), dict[str, tuple[str, Shape, list[Box]]](), 0
    for number, handle in enumerate(handles):
        for position, (_, group, shard) in enumerate(handle.group_leaves()):
            if group.trainable is frozen:
                continue
            stacked = handle.entry.stacked(group)
            n = group.layout.shard_numel(handle.owner.comms.within(group.over).ranks)
            if tuple(shard.shape) != ((len(group.held), n) if stacked else (n if group.held else 0,)):
                raise ValueError(f"publish_weights: {group.name} has a leaf {shape_of(shard)}, expected a local shard")
            kind = dtype if dtype is not None and shard.is_floating_point() else shard.dtype
            at = round_up(at, 64)
            sections.append(Section(number, position, group.counted, n, kind, at))
            for row in group.counted:
                for name, shape, found in _leaves(handle, group, group.here[row], n):
                    here = [box._replace(at=at + box.at * kind.itemsize) for box in found]
                    leaves[name] = str(kind).removeprefix("torch."), shape, here
                at += n * kind.itemsize
    return Plan(json.dumps({"format": FORMAT, "leaves": leaves}).encode(), sections, at)


class File:
    """A file that this rank has made, with its memory. frozen: that of the frozen leaves that go with it"""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.version = path, size, -1
        self.frozen: File | None = None
        self.stream = disk.made(path)
        try:
            self.memory = torch.frombuffer(disk.room(self.stream, size), dtype=torch.uint8)
        except OSError as error:
            disk.remove(path)
            raise OSError(error.errno, f"{error.strerror}; {size:,} bytes are needed", str(path)) from error


class WeightPublisher:
    """The function that `publish_weights` returns: `(params, version) -> None`."""

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype, self._run, self._version = folder, dtype, -1, -1
        self._plans: tuple[Any, list[Plan]] = None, []
        self._files: list[File] = []  # the two newest
        self._frozen: list[tuple[Tensor, int]] = []  # leaves as they were written, and their versions

    @torch.no_grad()
    def __call__(self, params: Tree, version: int) -> None:
        handles, comms = checked(params, "publish_weights")
        if type(version) is not int or not self._version < version < 10**18:
            after = f"above {self._version}, the last one" if self._version >= 0 else "of at least 0"
            raise ValueError(f"publish_weights: version {version!r}: expected an integer {after}")
        trained, frozen = self._plan([handle.check() for handle in handles])
        if self._run < 0:
            self._begin(comms, version)
        self._version = version
        if comms.replica > 0:
            return
        name = f"{self._run:016x}.{version}.{comms.stage * comms.ranks + comms.rank}-of-{comms.stages * comms.ranks}"
        old, with_it = self._files[:-1], self._files[-1].frozen if self._files else None
        now = [(leaf, leaf._version) for leaf in (handles[of.handle].leaves[of.leaf] for of in frozen.sections)]
        same = len(now) == len(self._frozen)
        gone = {file.frozen for file in self._files}
        try:
            if not (same and all(a is b and x == y for (a, x), (b, y) in zip(now, self._frozen, strict=True))):
                with_it = self._write(f"{name}.frozen", frozen, handles)
                gone.add(with_it)
            newest = self._write(name, trained, handles, with_it, *old)
            self._files, self._frozen = [*self._files[-1:], newest], now
        finally:  # of a version that was not written, too
            for file in gone - {each.frozen for each in self._files}:
                if file is not None:
                    disk.remove(file.path)

    def _begin(self, comms: Communicators, version: int) -> None:
        """Agrees on a number of the run, and removes what earlier runs have left. Collective."""
        alike = {"dtype": str(self._dtype), "version": str(version), "machine": machine()}
        comms.must_agree("what is published", alike)
        number = torch.tensor([secrets.randbits(62)])
        self._run = int(comms.numbers_of_all(number, f"publishing to {self._folder}")[0])
        disk.private_folder(self._folder)
        for path in self._folder.iterdir():
            if (match := NAME.fullmatch(path.name)) and int(match[1], 16) != self._run:
                disk.remove(path)

    def _plan(self, handles: list[Sharded]) -> list[Plan]:
        """Plans both files, once for each layout."""
        key = [(handle.entry, [(leaf.dtype, leaf.shape) for leaf in handle.leaves]) for handle in handles]
        if key != self._plans[0]:
            self._plans = key, [plan(handles, frozen, self._dtype) for frozen in (False, True)]
        return self._plans[1]

    def _write(
        self, name: str, of: Plan, handles: list[Sharded], frozen: File | None = None, old: File | None = None
    ) -> File:
        """Writes a file, over `old` if it may be."""
        begin, partial = begin_of(len(of.head)), self._folder / f"{name}.partial"
        file = self._taken(old, begin + of.nbytes, partial) or File(partial, begin + of.nbytes)
        try:
            for section in of.sections:
                shards, nbytes = handles[section.handle].leaves[section.leaf], section.n * section.dtype.itemsize
                for at, row in zip(itertools.count(begin + section.at, nbytes), section.rows, strict=False):
                    file.memory[at : at + nbytes].view(section.dtype).copy_(shards.view(-1, section.n)[row])
            before = -1 if frozen is None else frozen.version
            checks = zlib.crc32(machine().encode()), len(of.head), zlib.crc32(of.head)
            text = STAMP.pack(MAGIC, self._run, self._version, before, *checks) + of.head
            file.memory[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        except BaseException:
            disk.remove(partial)
            self._files = [each for each in self._files if each is not file]
            raise
        finally:
            disk.release(file.stream)
        file.path, file.version, file.frozen = partial.rename(self._folder / name), self._version, frozen
        return file

    def _taken(self, old: File | None, size: int, partial: Path) -> File | None:
        """Locks the oldest file and takes it back, or removes it if somebody reads it, who may go on."""
        if old is None:
            return None
        try:
            if old.size != size or not disk.try_lock(old.stream):
                old.path.unlink()
                self._files.remove(old)  # also if there is no room for a new one
                return None
            old.path = old.path.rename(partial)
        except FileNotFoundError:
            raise RuntimeError(
                f"publish_weights: {old.path} has been removed: another run publishes there, or somebody has emptied "
                "the folder; give each run a folder of its own"
            ) from None
        return old


def publish_weights(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> WeightPublisher:
    """Returns `publish(params, version)`, which writes this rank's shards to `folder`, for `pull_weights`.

    folder: on the machine of all ranks and readers, in its memory: `/dev/shm/NAME`. It is this run's alone: what
        earlier runs have published there is removed. It stays when the run ends
    dtype: floating-point leaves are written in it; None: as they are

    params: sharded, such as `state.params`. version: an integer that grows, such as `state.step`

    All ranks call it alike, at least a step apart; the first time they agree on the run, later no rank waits for
    another, or for a reader. A rank's files take its shards twice, in `dtype`. Of replicas the first publishes. Frozen
    leaves are written once, and anew only if somebody has changed them. Names and shapes are those of `named_weights`,
    but for a matrix `w` with an adapter, whose parts are leaves: `w.weight` (or `w.int8`, `w.row_scale`), `w.a`, `w.b`.

    Raises TypeError for what is not sharded, ValueError for a version that does not grow, RanksDisagree for ranks on
    several machines, OSError for a folder that cannot be written to or is another user's, and RuntimeError where
    somebody has removed this run's files.

    >>> publish = ya.publish_weights(folder, dtype=torch.bfloat16)
    >>> publish(state.params, version=1)
    >>> head = torch.empty(16, 8, dtype=torch.bfloat16)
    >>> ya.pull_weights(folder, {"head.out": head})()
    1
    >>> torch.equal(head, plain["head"]["out"].bfloat16())
    True
    """
    return WeightPublisher(Path(folder), dtype)
