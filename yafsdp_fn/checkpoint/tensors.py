"""The tensors of a checkpoint: files of safetensors, one for each rank, with the parts that it has written.

    write(folder, rank, {part_name("params.layers", (0, 1024)): part, ...})     # a rank's parts, by where they lie
    stored = scan(folder)                           # the headers alone: {key: CheckpointTensor(parts)}
    stored["params.layers"].read_into(shard, (0, a))    # a slice of it, from the parts that overlap

A part is called by its key and its offsets in the whole tensor, `params.layers@0,1024`. The files are untrusted: they
hold numbers alone, and the library checks that each tensor lies inside its file; that parts tile the whole tensor,
without gap or overlap, is checked here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from yafsdp_fn.checkpoint.folder import CheckpointError
from yafsdp_fn.util import disk

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in the files: those that a state may have."""
_NAME = re.compile(r"(.*)@((?:\d{1,18}(?:,\d{1,18})*)?)", re.DOTALL)


def part_name(key: str, offsets: tuple[int, ...]) -> str:
    """Returns the name of a part, from the key of its tensor and its offsets there."""
    return f"{key}@{','.join(map(str, offsets))}"


def write(folder: Path, rank: int, parts: Mapping[str, Tensor]) -> None:
    """Writes a rank's parts, by name, into `folder`, and has them reach the disk. Raises OSError."""
    path = folder / f"rank-{rank:05d}{SUFFIX}"
    for name, part in parts.items():
        if part.dtype not in DTYPES.values():
            key = name.rpartition("@")[0]
            raise CheckpointError(f"{key}: {part.dtype} is not kept in checkpoints; expected one of {list(DTYPES)}")
    try:
        save_file({name: part.detach().cpu().contiguous() for name, part in parts.items()}, path)
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{path} cannot be written: {error}") from error
    disk.sync_file(path)


class TensorPart(NamedTuple):
    """A part of a tensor: where it lies there, its shape, and its name in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    name: str


class CheckpointTensor(NamedTuple):
    """A tensor in the files of a folder."""

    key: str
    parts: tuple[TensorPart, ...]

    def check(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the parts make up a tensor of that form."""
        for part in self.parts:
            if part.dtype != dtype or len(part.offsets) != len(shape):
                have = f"{part.dtype} {part.sizes} at {part.offsets}"
                raise CheckpointError(f"{part.file}: {self.key} is {have}, expected a part of {dtype} {shape}")
        if not _tiles(shape, self.parts):
            files = ", ".join(sorted({part.file.name for part in self.parts})) or "no file"
            raise CheckpointError(
                f"{self.key}: its {len(self.parts)} parts in {files} do not make up a tensor of shape {shape}"
            )

    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fills `target` with the slice of its shape at `offsets`. Holds one part at a time."""
        for part in self.parts:
            here = []
            there = []
            for begin, size, at, n in zip(offsets, target.shape, part.offsets, part.sizes, strict=True):
                first = max(begin, at)
                last = max(first, min(begin + size, at + n))
                here.append(slice(first - begin, last - begin))
                there.append(slice(first - at, last - at))
            common = target[tuple(here)]
            if common.numel():
                common.copy_(self._read(part, tuple(there)))

    def _read(self, part: TensorPart, cut: tuple[slice, ...]) -> Tensor:
        with _opened(part.file, f": {self.key}") as file:
            found: Tensor = file.get_slice(part.name)[cut] if cut else file.get_tensor(part.name)
        return found


@contextmanager
def _opened(path: Path, what: str = "") -> Iterator[Any]:
    """Opens a file of safetensors. what: is in errors behind the file"""
    try:
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}{what} cannot be read: {error}") from error


def scan(folder: Path) -> dict[str, CheckpointTensor]:
    """Returns the tensors in `folder`, by key, from the headers of its files. Raises CheckpointError."""
    found: dict[str, list[TensorPart]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is no file of this folder")
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                found.setdefault(name.rpartition("@")[0], []).append(_part(path, name, file.get_slice(name)))
    return {key: CheckpointTensor(key, tuple(parts)) for key, parts in found.items()}


def _part(path: Path, name: str, about: Any) -> TensorPart:
    """Returns the part that a tensor in a file is. Raises CheckpointError unless its name and dtype can be."""
    match = _NAME.fullmatch(name)
    dtype = about.get_dtype()
    sizes = tuple(about.get_shape())
    numbers = match[2].split(",") if match is not None and match[2] else []
    offsets = tuple(map(int, numbers))
    if match is None or dtype not in DTYPES or len(offsets) != len(sizes):
        raise CheckpointError(
            f"{path}: {name!r:.200} ({dtype} {sizes}): expected the key and the offsets of a part, of a dtype among "
            f"{', '.join(DTYPES)}"
        )
    return TensorPart(offsets, sizes, DTYPES[dtype], path, name)


def _tiles(shape: tuple[int, ...], parts: Sequence[TensorPart]) -> bool:
    """Returns whether the parts are the cells of a grid over `shape`: ranks cut tensors so, evenly or not."""
    held = [part for part in parts if 0 not in part.sizes]
    if 0 in shape or not held:
        return not held and 0 in shape
    cells = 1
    for axis, size in enumerate(shape):
        spans = sorted({(part.offsets[axis], part.offsets[axis] + part.sizes[axis]) for part in held})
        starts = [start for start, _ in spans]
        ends = [end for _, end in spans]
        if [*starts, size] != [0, *ends]:  # each begins where the one before it ends
            return False
        cells *= len(spans)
    return len(held) == len({part.offsets for part in held}) == cells
