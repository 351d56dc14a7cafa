"""Reads and writes tensors in the folders of torch.distributed.checkpoint; nothing in them is trusted."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from yafsdp_fn.checkpoint import pickles
from yafsdp_fn.checkpoint.folder import CheckpointError

# ---- Reads tensors from a folder that torch.distributed.checkpoint wrote, for us or another library. It is
# untrusted.
#
#     stored = scan(folder)                           # the index alone: {name: Stored(dtype, shape, parts)}
#     stored["model.norm.weight"].read()              # that tensor, from all its parts
#     stored["params.layers"].read_into(shard, (0, a))    # a slice of it, from the parts that overlap
#
# Before anything is allocated it checks that the parts of a tensor tile it, without gap or overlap, and that each is
# inside a file of this folder. No pickle is executed (pickles.py). Any number of ranks may read, each for itself.

INDEX = ".metadata"


class Part(NamedTuple):
    """A part of a tensor: its offsets and sizes there, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    at: int
    length: int


class Stored(NamedTuple):
    """A tensor in a folder that torch.distributed.checkpoint wrote."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def read(self) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, (0,) * len(self.shape))
        return whole

    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fills `target` with the slice of its shape at `offsets`. Holds one part at a time."""
        for part in self.parts:
            here, there = [], []
            for begin, size, at, n in zip(offsets, target.shape, part.offsets, part.sizes, strict=True):
                first, last = max(begin, at), min(begin + size, at + n)
                here.append(slice(first - begin, max(first, last) - begin))
                there.append(slice(first - at, max(first, last) - at))
            if target[tuple(here)].numel():
                target[tuple(here)].copy_(self._part(part)[tuple(there)])

    def _part(self, part: Part) -> Tensor:
        with part.file.open("rb") as stream:
            stream.seek(part.at)
            data = stream.read(part.length)
        try:
            return pickles.read_tensor(data, self.dtype, part.sizes)
        except ValueError as error:
            raise CheckpointError(f"{part.file}, byte {part.at}: {self.name} is damaged: {error}") from error


def scan(folder: Path) -> dict[str, Stored]:
    """Returns the tensors in `folder`, by name. Pickled objects are left out, unread."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
        index = pickles.read_metadata(data)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    sizes: dict[str, int] = {}
    found, count = {}, 0
    for name, of in index.tensors.items():
        if not pickles.is_a(of, "BytesStorageMetadata"):
            try:
                found[name] = _stored(folder, name, pickles.fields(of, "TensorStorageMetadata"), index.places, sizes)
                count += len(found[name].parts)
                if count > len(data):  # empty parts cost no bytes, and could be shared by all names
                    raise ValueError("there are more parts than the file has room for")
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{path}: {name!r:.200}: {error}") from error
    return found


def _stored(
    folder: Path,
    name: str,
    of: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...]], Any],
    sizes: dict[str, int],
) -> Stored:
    dtype, shape, chunks = pickles.dtype_of(of.get("properties")), pickles.numbers(of.get("size")), of.get("chunks")
    if type(chunks) is not list:
        raise ValueError("expected a list of its parts")
    parts = []
    for chunk in chunks:
        cut = pickles.fields(chunk, "ChunkStorageMetadata")
        offsets, extent = pickles.numbers(cut.get("offsets")), pickles.numbers(cut.get("sizes"))
        if (name, offsets) not in places:
            raise ValueError(f"nothing says where its part at {offsets} lies")
        file, at, length = _place(folder, pickles.fields(places[name, offsets], "_StorageInfo"), sizes)
        if not len(offsets) == len(extent) == len(shape) or math.prod(extent) * dtype.itemsize > length:
            raise ValueError(f"a part of shape {extent} does not fit {length} bytes, or shape {shape}")
        parts.append(Part(offsets, extent, file, at, length))
    if not _tiles(shape, parts):
        raise ValueError(f"its {len(parts)} parts do not make up a tensor of shape {shape}")
    return Stored(name, dtype, shape, tuple(parts))


def _place(folder: Path, place: Mapping[str, Any], sizes: dict[str, int]) -> tuple[Path, int, int]:
    """Returns the file, the offset of its bytes, and their number."""
    file, (at, length) = place.get("relative_path"), pickles.numbers((place.get("offset"), place.get("length")))
    if type(file) is not str or len(file) > 255 or Path(file).name != file or "\0" in file or "\\" in file:
        shown = f"{file[:200]!r}" if isinstance(file, str) else f"a {type(file).__name__}"
        raise ValueError(f"it is said to lie in {shown}: expected the name of a file in this folder")
    if place.get("transform_descriptors"):
        raise ValueError("it is stored transformed (compressed or encrypted), which is not read here")
    if file not in sizes:
        if (folder / file).is_symlink():
            raise ValueError(f"{file} is a link out of the folder")
        sizes[file] = (folder / file).stat().st_size
    if at + length > sizes[file]:
        raise ValueError(f"{file} has {sizes[file]:,} bytes; bytes {at:,} to {at + length:,} were expected")
    return folder / file, at, length


def _tiles(shape: tuple[int, ...], parts: Sequence[Part]) -> bool:
    """Returns whether the parts are the cells of a grid over `shape`: ranks cut tensors so, evenly or not."""
    held = [part for part in parts if 0 not in part.sizes]
    if 0 in shape or not held:
        return not held and 0 in shape
    edges = []
    for axis, size in enumerate(shape):
        spans = sorted({(part.offsets[axis], part.offsets[axis] + part.sizes[axis]) for part in held})
        if spans[0][0] != 0 or spans[-1][1] != size or any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
            return False
        edges.append(len(spans))
    return len(held) == len({part.offsets for part in held}) == math.prod(edges)


# ---- `Writer`: that of torch.distributed.checkpoint, with the system's reason when a file cannot be written.
#
# torch's archive replaces an OSError by one of its own, about a position, which does not mention a full disk.


class Writer(FileSystemWriter):
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with self._saying_why():
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with self._saying_why():
            super().finish(*args, **kwargs)

    @contextmanager
    def _saying_why(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error
