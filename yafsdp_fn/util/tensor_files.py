"""Directories of safetensors files, one file or several with an index: read by name. `tensor_writer.py` writes them.

stored = scan_directory(directory)             # headers only: {name: StoredTensor(name, file, shape, kind)}
stored["model.norm.weight"].read()             # that tensor and nothing else
"""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.util.model_folder import weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its location, and the header's description of it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: str
    stamp: tuple[int, ...] = dataclasses.field(repr=False)
    """Identifies the file whose header was read: a save puts another file there, with another model's tensors."""

    @property
    def dtype(self) -> torch.dtype:
        if self.kind not in DTYPES:
            raise TypeError(
                f"{self.file}: {self.name} is {self.kind}, expected one of {', '.join(DTYPES)}; "
                f"a quantised model has to be dequantised first"
            )
        return DTYPES[self.kind]

    def read(self) -> Tensor:
        """Returns the tensor, on the CPU. The file is mapped, so untouched pages are not read."""
        with _open(self.file) as handle:
            if _stamp(self.file) != self.stamp:
                raise ValueError(
                    f"{self.file}: another file than when the model was opened; save to a directory of its own, or "
                    f"load the model again"
                )
            tensor: Tensor = handle.get_tensor(self.name)
            return tensor


def scan_directory(directory: Path) -> dict[str, StoredTensor]:
    """Describes every tensor in `directory`, from headers alone: shapes, dtypes and offsets are checked against the
    lengths of the files. Raises if a file is missing, cut short or damaged."""
    out: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        stamp = _stamp(file)
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict, not iterable)
                if name in out:
                    raise ValueError(
                        f"{file}: {reprlib.repr(name)} is in {out[name].file.name} as well; delete the file that is "
                        f"not of this model"
                    )
                part = handle.get_slice(name)
                out[name] = StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype(), stamp)
    return out


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except FileNotFoundError as error:
        raise _gone(file) from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def _gone(file: Path) -> FileNotFoundError:
    return FileNotFoundError(f"{file}: no such file, though it was there when the model was opened")


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading safetensors needs the library: pip install 'yafsdp_fn[hf]'") from error
    try:
        with torch.device("cpu"), safe_open(file, framework="pt") as handle:
            yield handle
    except FileNotFoundError as error:
        raise _gone(file) from error
    except SafetensorError as error:
        raise ValueError(
            f"{file}: damaged or cut short at {file.stat().st_size} bytes ({str(error)[:200]!a}); copy it again"
        ) from error
