"""Writes a model as a stream. An earlier model in the directory stays whole until the new one is.

    with Writer(directory, names) as writer:       # holds one tensor in memory at a time
        writer.add("model.norm.weight", tensor)
        writer.publish({"config.json": values})    # replaces the earlier model, not before

The safetensors library writes whole dicts, so it holds a file's tensors in memory at once. The format needs less: 8
bytes of header length, a JSON header, the tensors back to back. `Writer` reserves room for the header, streams the
tensors behind it and fills the header in at the end; the spaces left over are legal JSON.

Readers look for `model.safetensors` first, then for an index. So the change from the earlier model to the new one is:

    to one file             model.safetensors is renamed into place
    several to several      the index is renamed; it lists files of other names than the earlier one's
    one to several          the index is renamed, which nobody sees yet; then model.safetensors is removed

What changes settings removes config.json before, and renames the new one into place behind it (`settings.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from models.files.settings import CONFIG, GENERATION, PARTIAL, Settings, differs, write_aside
from yafsdp_fn.util.disk import sync_folder
from yafsdp_fn.util.model_folder import INDEX, SINGLE
from yafsdp_fn.util.tensor_files import DTYPES

SHARDS = "model-*-of-*.safetensors"

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer:
    """Writes tensors to `directory` in the order they come, beginning a new file before one passes `max_shard_bytes`.

    names: all tensors to be added, which bounds the size of a header

    It is a context manager: leaving it removes what is not published, and the earlier model stays. Passes on the disk's
    OSError.
    """

    def __init__(self, directory: Path, names: Iterable[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected a positive number, got {max_shard_bytes}")
        self.directory, self.max_shard_bytes = directory, max_shard_bytes
        self.total_bytes = 0
        self._names = set(names)
        # 192: what an entry takes beside its name with 20 digits in every number, rounded up; 120: metadata
        self._header_bytes = -(-sum(len(json.dumps(name)) + 192 for name in self._names) // 64) * 64 + 120
        self._made: list[Path] = []  # files that are not published yet
        self._headers: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._at = 0
        self.dtype: torch.dtype | None = None
        """The widest dtype added."""

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: cannot write {tensor.dtype}; expected one of {', '.join(map(str, DTYPE_NAMES))}")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        if name not in self._names:
            raise ValueError(f"{name}: added twice, or not among the names this writer was made for")
        self._names.remove(name)
        full = self._at > 0 and self._at + data.nbytes > self.max_shard_bytes
        # tensors lie back to back, and readers want them aligned: a wider dtype may need a file of its own
        if self._file is None or full or self._at % tensor.element_size():
            self._next_file()
        assert self._file is not None
        self._file.write(data)
        end = self._at + data.nbytes
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self._at, end]}
        self._headers[-1][name] = entry
        self._at = end
        self.total_bytes += data.nbytes
        self.dtype = tensor.dtype if self.dtype is None else torch.promote_types(self.dtype, tensor.dtype)

    def publish(self, settings: Settings) -> None:
        """Puts the tensors and the settings in place of any earlier model. After a kill, or an error raised here, the
        directory holds one of the two models, whole; or, between renames that change settings, no config.json."""
        root = self.directory
        single = len(self._headers) == 1
        changes = any(differs(root, name, settings) for name in (CONFIG, GENERATION))
        self._finish_file()
        asides = {name: write_aside(root, name, values) for name, values in settings.items()}
        names = [SINGLE] if single else _free_names(root, len(self._headers))
        if not single:
            for index, name in enumerate(names):
                self._made[index] = self._made[index].rename(root / name)
            weight_map = {tensor: file for file, header in zip(names, self._headers, strict=True) for tensor in header}
            metadata = {"total_size": self.total_bytes}
            aside = write_aside(root, INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
        if changes:
            (root / CONFIG).unlink(missing_ok=True)
        sync_folder(root)
        # ---- the change
        if single:
            self._made[0].replace(root / SINGLE)
            self._made = []
        else:
            self._made = []  # from here on they may be the model
            aside.replace(root / INDEX)
            sync_folder(root)
            (root / SINGLE).unlink(missing_ok=True)
        sync_folder(root)
        for name in (GENERATION, CONFIG) if changes else ():
            if name in asides:
                asides[name].replace(root / name)
            else:
                (root / name).unlink(missing_ok=True)
        sync_folder(root)
        for stale in [root / INDEX] * single + [file for file in root.glob(SHARDS) if file.name not in names]:
            stale.unlink(missing_ok=True)
        _remove_partial(root)

    def __enter__(self) -> Writer:
        self.directory.mkdir(parents=True, exist_ok=True)
        _remove_partial(self.directory)  # by a process that was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still in its buffer has no room on the disk
                self._file.close()
        for file in self._made:
            with contextlib.suppress(OSError):  # the next save removes it; `error` is what matters
                file.unlink()

    def _next_file(self) -> None:
        self._finish_file()
        made = self.directory / PARTIAL.format(f"{len(self._made)}.safetensors")
        self._file = made.open("xb")  # never through a link that lies there
        self._made.append(made)
        self._headers.append({})
        self._file.seek(8 + self._header_bytes)
        self._at = 0

    def _finish_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._headers[-1]}).encode()
        assert len(header) <= self._header_bytes
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None


def _free_names(root: Path, count: int) -> list[str]:
    """Returns names for the files of an index, the usual ones unless such files exist."""
    there = {file.name for file in root.iterdir()}
    for mark in itertools.chain([""], (f"{number}-" for number in itertools.count(2))):
        names = [f"model-{mark}{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if not there.intersection(names):
            break
    return names


def _remove_partial(root: Path) -> None:
    """Removes what a save has left."""
    for left in root.glob(PARTIAL.format("*")):
        left.unlink(missing_ok=True)
