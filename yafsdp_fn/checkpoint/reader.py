"""The tensors in a folder that torch.distributed.checkpoint wrote, ours or another library's. Nothing in it is trusted.

    stored = scan(folder)                           # the index alone: {name: Stored(dtype, shape, parts)}
    stored["model.norm.weight"].read()              # that tensor, from all its parts
    stored["params.layers"].read_into(shard, (0, a))    # a box of it, from the parts that overlap

Checked before anything is allocated: the parts of a tensor tile it, without gap or overlap, and each lies in a file of
this folder, inside that file. No pickle runs (pickles.py). Any number of ranks may read, each for itself.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from yafsdp_fn.checkpoint import pickles
from yafsdp_fn.checkpoint.folder import CheckpointError

INDEX = ".metadata"


class Part(NamedTuple):
    """Of a tensor: where it begins there, its shape, and the bytes that hold it."""

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
        """The whole tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, (0,) * len(self.shape))
        return whole

    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fills `target` with the box of its shape at `offsets`. Holds one part at a time."""
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
    """The tensors in `folder`, by name. What is no tensor (a pickled object) is left out, unread."""
    path = folder / INDEX
    try:
        index = pickles.read_metadata(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    of_tensors, places = index.state_dict_metadata, index.storage_data
    if not isinstance(of_tensors, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{path}: expected tables of tensors and of where they lie")
    sizes: dict[str, int] = {}
    found = {}
    for name, of in of_tensors.items():
        if isinstance(of, TensorStorageMetadata):
            try:
                found[name] = _stored(folder, name, of, places, sizes)
            except (ValueError, TypeError, AttributeError, OSError) as error:
                raise CheckpointError(f"{path}: {name!r:.200}: {error}") from error
    return found


def _stored(
    folder: Path, name: str, of: TensorStorageMetadata, places: Mapping[Any, Any], sizes: dict[str, int]
) -> Stored:
    if not isinstance(name, str) or not isinstance(of.properties.dtype, torch.dtype):
        raise ValueError("expected a name and a dtype")
    dtype, shape = of.properties.dtype, _numbers(of.size)
    parts = tuple(_part(folder, name, chunk, places, sizes) for chunk in of.chunks)
    for part in parts:
        if len(part.sizes) != len(shape) or math.prod(part.sizes) * dtype.itemsize > part.length:
            raise ValueError(f"a part of shape {part.sizes} does not fit {part.length} bytes, or shape {shape}")
    if not _tiles(shape, parts):
        raise ValueError(f"its {len(parts)} parts do not make up a tensor of shape {shape}")
    return Stored(name, dtype, shape, parts)


def _part(
    folder: Path, name: str, chunk: ChunkStorageMetadata, places: Mapping[Any, Any], sizes: dict[str, int]
) -> Part:
    place = places.get(MetadataIndex(name, chunk.offsets))
    if place is None:
        raise ValueError(f"nothing says where its part at {tuple(chunk.offsets)} lies")
    file, (at, length) = place.relative_path, _numbers((place.offset, place.length))
    if not isinstance(file, str) or Path(file).name != file or "\0" in file or "\\" in file:
        raise ValueError(f"it is said to lie in {file!r:.200}: expected the name of a file in this folder")
    if getattr(place, "transform_descriptors", None):
        raise ValueError("it is stored transformed (compressed or encrypted), which is not read here")
    if file not in sizes:
        if (folder / file).is_symlink():
            raise ValueError(f"{file} is a link out of the folder")
        sizes[file] = (folder / file).stat().st_size
    if at + length > sizes[file]:
        raise ValueError(f"{file} has {sizes[file]:,} bytes; bytes {at:,} to {at + length:,} were expected")
    return Part(_numbers(chunk.offsets), _numbers(chunk.sizes), folder / file, at, length)


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 2**62 for value in values):
        raise ValueError(f"expected numbers of elements or bytes, got {values!r:.200}")
    return tuple(values)


def _tiles(shape: tuple[int, ...], parts: Sequence[Part]) -> bool:
    """Whether the parts are the cells of a grid over `shape`: how ranks cut tensors, evenly or not."""
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
