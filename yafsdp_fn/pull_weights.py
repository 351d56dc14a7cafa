"""pull_weights: brings the tensors of a generator up to date from the files that `publish_weights` writes.

    into = {
        "layers.0.wq": qkv[:64],                                 # a leaf into a part of a tensor
        "layers.0.w_up": (up, slice(128, 256)),                  # rows of a leaf, as a tensor-parallel rank has them
        "layers.0.w_down": (down, (slice(None), slice(128, 256))),  # columns
    }
    pull = ya.pull_weights("/dev/shm/run", into)
    step = pull()

Each rank's file is locked and mapped, and its head says which boxes of which leaves it has. What these have in common
with the slices is copied, box by box, straight into the tensors: nothing else is read. A trainer uses its files again,
so mappings are kept. Nothing in a file is trusted, and nothing is unpickled.
"""

import difflib
import mmap
import os
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.publish_weights import FORMAT, MAGIC, NAME, STAMP, Box, Shape, begin_of, machine, within
from yafsdp_fn.util import disk, strict_json

# ---- Heads: what a file has of each leaf.

_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


class Leaf(NamedTuple):
    """A leaf, as far as it is in a file. shape: of all of it"""

    dtype: torch.dtype
    shape: Shape
    boxes: tuple[Box, ...]


def leaves_of(head: bytes, nbytes: int, path: Path) -> dict[str, Leaf]:
    """Reads the head of a file with so many bytes of shards. Raises ValueError, naming the file and the leaf."""
    name, out = "its head", dict[str, Leaf]()
    try:
        described = strict_json.loads(head.decode())
        if described["format"] != FORMAT:
            raise ValueError(f"format {described['format']!r:.40}, and this version reads format {FORMAT}")
        for name, (kind, whole, found) in described["leaves"].items():
            leaf = Leaf(
                _DTYPES[kind], _sizes(whole), tuple(Box(_sizes([at])[0], *map(_sizes, of)) for at, *of in found)
            )
            for at, offsets, sizes, strides in leaf.boxes:
                inside = all(0 <= a < a + size <= n for a, size, n in zip(offsets, sizes, leaf.shape, strict=True))
                last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
                end = at + (last + 1) * leaf.dtype.itemsize
                if not inside or at % leaf.dtype.itemsize or end > nbytes:
                    raise ValueError(
                        f"elements {sizes} from {offsets} on of {leaf.shape}, bytes {at} to {end} of {nbytes}"
                    )
            out[name] = leaf
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {name:.100}: {type(error).__name__}: {error}") from None
    return out


def _sizes(numbers: Any) -> Shape:
    if not isinstance(numbers, list) or any(type(number) is not int or not 0 <= number < 2**60 for number in numbers):
        raise ValueError(f"{numbers!r:.80} are no sizes")
    return tuple(numbers)


# ---- Files, and what is taken of them.


class Take(NamedTuple):
    """A copy of a box of a file into a view of a tensor."""

    name: str
    target: Tensor
    dtype: torch.dtype
    box: Box


class Content(NamedTuple):
    """The content of a file: its run and version, its head, and what is taken of it."""

    of: tuple[int, int]
    head: bytes
    leaves: dict[str, Leaf]
    takes: list[Take]


class Mapped:
    """A trainer's file, mapped. The trainer may have used it again meanwhile, for another version."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream, self.size = path, stream, os.fstat(stream.fileno()).st_size
        if self.size < STAMP.size:
            raise ValueError(f"{path} is damaged: it has {self.size} bytes")
        self._map = mmap.mmap(stream.fileno(), self.size, access=mmap.ACCESS_READ)
        self._views: tuple[list[Take], list[Tensor]] = [], []

    def read(self, run: int, version: int) -> tuple[int, bytes]:
        """Returns the version of the frozen leaves that go with it, and its head. Raises FileNotFoundError if it is no
        longer of this version."""
        if (size := os.fstat(self.stream.fileno()).st_size) != self.size:  # else a read beyond its end would be fatal
            raise ValueError(f"{self.path} is damaged: it had {self.size:,} bytes, and has {size:,}")
        magic, of, now, frozen, where, length, check = STAMP.unpack(self._map[: STAMP.size])
        if (magic, of) != (MAGIC, run) or begin_of(length) > size:
            raise ValueError(
                f"{self.path} is damaged, or not from ya.publish_weights: expected {MAGIC!r}, run {run:016x} and "
                f"{begin_of(length):,} bytes or more, got {magic!r}, run {of:016x} and {size:,} bytes"
            )
        if where != zlib.crc32(machine().encode()):
            raise ValueError(
                f"{self.path} is another machine's, or of before this one was started: files can be mapped on one alone"
            )
        if now != version:
            raise FileNotFoundError(self.path)
        head = self._map[STAMP.size : STAMP.size + length]
        if zlib.crc32(head) != check:
            raise ValueError(f"{self.path} is damaged: its head has another checksum")
        return frozen, head

    def sources(self, content: Content) -> list[Tensor]:
        """Returns a view for each take. They must not be written to."""
        if self._views[0] is not content.takes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that they cannot be
                memory = torch.frombuffer(self._map, dtype=torch.uint8)[begin_of(len(content.head)) :]
            out = []
            for _, _, dtype, box in content.takes:
                flat = memory[box.at :]
                flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                out.append(flat.as_strided(box.sizes, box.strides, flat.storage_offset()))
            self._views = content.takes, out
        return self._views[1]


class WeightReader:
    """The function that `pull_weights` returns: `(at_least=None, timeout=60.0) -> version`.

    nbytes: that its last call has read; 0 if nothing was new
    """

    def __init__(self, folder: str | os.PathLike[str], into: Mapping[str, Any]) -> None:
        self._folder, self._into, self.nbytes = Path(folder), {name: _wanted(name, of) for name, of in into.items()}, 0
        self._pulled: tuple[int, int] | None = None  # run and version
        self._mapped: dict[tuple[int, int], Mapped] = {}  # by device and inode
        self._contents: dict[tuple[int, bool], Content] = {}  # by rank; True: of frozen leaves

    @torch.no_grad()
    def __call__(self, at_least: int | None = None, timeout: float = 60.0) -> int:
        begun, self.nbytes = time.monotonic(), 0
        while True:
            runs = self._published()
            for (run, count), versions in runs.items() if len(runs) == 1 else ():
                newest = max((version for version, ranks in versions.items() if len(ranks) == count), default=-1)
                if newest >= (at_least or 0) and (self._pulled == (run, newest) or self._pull(run, newest, count)):
                    return newest
            if (waited := time.monotonic() - begun) > timeout:
                raise TimeoutError(f"pull_weights: {self._folder}: after {timeout:g} s {_why_not(runs, at_least)}")
            time.sleep(min(0.001 + waited / 20, 0.05))  # a twentieth too late, at most

    def _published(self) -> dict[tuple[int, int], dict[int, set[int]]]:
        """Returns the ranks that have published each version, by run and its number of ranks."""
        found: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in os.listdir(self._folder) if self._folder.is_dir() else ():
            if (match := NAME.fullmatch(name)) and not (match[5] or match[6]):
                version, rank, count = map(int, match.groups()[1:4])
                found[int(match[1], 16), count][version].add(rank)
        return found

    def _pull(self, run: int, version: int, count: int) -> bool:
        """Copies a version, or returns False if it is no longer there."""
        files: dict[tuple[int, bool], Mapped] = {}
        contents: dict[tuple[int, bool], Content] = {}
        with ExitStack() as locks, suppress(FileNotFoundError):
            for rank in range(count):
                key, name = (rank, False), f"{run:016x}.{{}}.{rank}-of-{count}"
                files[key], contents[key], frozen = self._locked(name.format(version), key, (run, version), locks)
                key, known = (rank, True), self._contents.get((rank, True))
                if known is not None and known.of == (run, frozen):
                    contents[key] = known
                elif frozen >= 0:
                    name = name.format(frozen) + ".frozen"
                    files[key], contents[key], _ = self._locked(name, key, (run, frozen), locks)
            self._check(contents)
            self._pulled = None  # until all is copied
            for key, file in files.items():
                for take, source in zip(contents[key].takes, file.sources(contents[key]), strict=True):
                    take.target.copy_(source)
                    self.nbytes += source.numel() * source.element_size()
            self._contents, self._pulled = contents, (run, version)
            self._mapped = {at: file for at, file in self._mapped.items() if os.fstat(file.stream.fileno()).st_nlink}
        return self._pulled == (run, version)

    def _locked(
        self, name: str, key: tuple[int, bool], of: tuple[int, int], locks: ExitStack
    ) -> tuple[Mapped, Content, int]:
        """Returns a file, its content, and the version of the frozen leaves that go with it. Raises FileNotFoundError
        if it is gone, or is being written."""
        path = self._folder / name
        found = path.lstat()
        inode = found.st_dev, found.st_ino
        file = self._mapped[inode] = self._mapped.get(inode) or Mapped(path, disk.opened(path))
        if not disk.try_lock(file.stream, shared=True):
            raise FileNotFoundError(path)
        locks.callback(disk.release, file.stream)
        frozen, head = file.read(*of)
        before = self._contents.get(key)
        if before is not None and before.head == head:
            return file, before._replace(of=of), frozen
        leaves = leaves_of(head, file.size - begin_of(len(head)), path)
        takes = [take for name in self._into if name in leaves for take in self._takes(name, leaves[name])]
        return file, Content(of, head, leaves, takes), frozen

    def _takes(self, name: str, leaf: Leaf) -> Iterator[Take]:
        """Yields the copies of a leaf from a file."""
        target, index = self._into[name]
        spans = [range(n)[cut] for n, cut in zip(leaf.shape, (*index, *[slice(None)] * len(leaf.shape)), strict=False)]
        if len(index) > len(spans) or tuple(map(len, spans)) != tuple(target.shape):
            part = f", of which {tuple(map(len, spans))} is asked for" if index else ""
            raise ValueError(
                f"pull_weights: {name} in {self._folder} has shape {leaf.shape}{part}; the tensor for it has "
                f"{tuple(target.shape)}"
            )
        if leaf.dtype != target.dtype and not (leaf.dtype.is_floating_point and target.is_floating_point()):
            raise TypeError(
                f"pull_weights: {name} in {self._folder} is {leaf.dtype}, and the tensor for it {target.dtype}: "
                "expected the same, or floating-point ones"
            )
        for box in leaf.boxes:
            if (found := within(box, spans, leaf.dtype.itemsize)) is not None:
                begins = [offset - span.start for offset, span in zip(found.offsets, spans, strict=True)]
                cut = tuple(slice(a, a + size) for a, size in zip(begins, found.sizes, strict=True))
                yield Take(name, target[cut], leaf.dtype, found)

    def _check(self, contents: Mapping[tuple[int, bool], Content]) -> None:
        """Raises ValueError unless all that is wanted is there, once."""
        there = defaultdict[str, set[tuple[torch.dtype, Shape]]](set)
        filled = dict.fromkeys(self._into, 0)
        for content in contents.values():
            for name, leaf in content.leaves.items():
                there[name].add((leaf.dtype, leaf.shape))
            for take in content.takes:
                filled[take.name] += take.target.numel()
        for name, (target, _) in self._into.items():
            if name not in there:
                near = ", ".join(difflib.get_close_matches(name, there, 6, 0))
                raise ValueError(f"pull_weights: {name!r} is not in {self._folder}; of {len(there)} leaves: {near}")
            if len(there[name]) > 1 or filled[name] != target.numel():
                forms = " and ".join(f"{dtype} {shape}" for dtype, shape in there[name])
                raise ValueError(
                    f"pull_weights: {self._folder} is damaged: {name} is {forms} there, and of {target.numel()} "
                    f"elements its files have {filled[name]}"
                )


def _wanted(name: str, of: Any) -> tuple[Tensor, tuple[slice, ...]]:
    """Returns a tensor and the slices for it."""
    target, index = of if isinstance(of, tuple) and len(of) == 2 else (of, ())
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(target, Tensor) or any(type(cut) is not slice or cut.step not in (None, 1) for cut in index):
        raise TypeError(
            f"pull_weights: {name}: expected a tensor, or (tensor, slices) such as (tensor, (slice(None), slice(0, "
            f"64))), of step 1, got {of!r:.200}"
        )
    return target, index


def _why_not(runs: Mapping[tuple[int, int], Mapping[int, set[int]]], at_least: int | None) -> str:
    """Says why there is nothing to pull, and which ranks are late."""
    if len(runs) != 1:
        return "several runs publish there: give each a folder of its own" if runs else "nobody has published there"
    (((_, count), versions),) = runs.items()
    asked = max(versions) if at_least is None else max(at_least, *versions)
    late = []
    for rank in range(count):
        last = max((version for version, ranks in versions.items() if rank in ranks), default=None)
        if last != asked:
            late.append(f"rank {rank} of {count}, {'which has published nothing' if last is None else f'last {last}'}")
    if not late:
        return f"version {asked} is there, and cannot be locked: its file system has no locks"
    return f"version {asked} is missing from {'; '.join(late[:8])}. It has ended, or is still in a step"


def pull_weights(folder: str | os.PathLike[str], into: Mapping[str, Any]) -> WeightReader:
    """Returns `pull(at_least=None, timeout=60.0) -> version`, which copies the newest published weights into tensors.

    folder: of `publish_weights`
    into: by name of a leaf, the tensor for it, or `(tensor, slices)` for a part of it, such as
        `(columns, (slice(None), slice(64, 128)))`. Tensors may be views, such as rows of a fused matrix, of any strides
        and device; floating-point ones may have another dtype

    at_least: a version that is waited for; None: the newest there is. timeout: seconds

    All of it is of one version. The newest is copied once: another call returns its number, and does nothing. Raises
    TimeoutError, which names the ranks that have not published; ValueError for a leaf that is not there or does not
    fit, and for a damaged file; OSError for one that is another user's. In all of these tensors are as they were.

    >>> ya.publish_weights(folder)(state.params, 3)
    >>> halves = torch.empty(2, 16, 4)                         # columns of one leaf
    >>> pull = ya.pull_weights(folder, {"head.out": (halves[0], (slice(None), slice(0, 4)))})
    >>> pull()
    3
    """
    return WeightReader(folder, into)
