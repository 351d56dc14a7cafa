"""Directories of safetensors files, one file or several with an index: read by name, written as a stream.

    stored = scan_directory(directory)             # headers only: {name: Stored(file, shape, dtype)}
    stored["model.norm.weight"].read()             # that tensor and nothing else

    with Writer(directory, names) as writer:       # never more in memory than the tensor at hand
        writer.add("model.norm.weight", tensor)

The safetensors library writes whole dicts, so a file's worth of tensors has to be in memory at once. The format needs
less: 8 bytes of header length, a JSON header, the tensors back to back. `Writer` reserves room for the header, streams
the tensors behind it and fills the header in at the end; the spaces left over are legal JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

SINGLE, INDEX, PARTIAL = "model.safetensors", "model.safetensors.index.json", "partial-{}.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies, and what its file's header says of it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        if self.kind not in DTYPES:
            raise TypeError(
                f"{self.file}: {self.name} is {self.kind}, expected one of {', '.join(DTYPES)}; "
                f"a quantised model has to be dequantised first"
            )
        return DTYPES[self.kind]

    def read(self) -> Tensor:
        """The tensor, on the CPU. The file is mapped, so pages nobody touches are not read."""
        with _open(self.file) as handle:
            tensor: Tensor = handle.get_tensor(self.name)
            return tensor


def scan_directory(directory: Path) -> dict[str, Stored]:
    """What every tensor in `directory` is, from headers alone. Raises if a file is missing, cut short or damaged."""
    out: dict[str, Stored] = {}
    for file in _files(directory):
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict, not iterable)
                part = handle.get_slice(name)
                out[name] = Stored(name, file, tuple(part.get_shape()), part.get_dtype())
    return out


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a Hugging Face model directory with a {file.name}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: damaged or cut short ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _files(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(
            f"{directory}: neither {SINGLE} nor {INDEX}; weights in other formats become safetensors by loading them "
            f"with transformers and calling save_pretrained"
        )
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{directory / INDEX}: no weight_map; copy the file again")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]}: no such file, though {INDEX} lists it ({len(missing)} of {len(files)} are missing); "
            f"copy the rest of the model"
        )
    return files


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading safetensors needs the library: pip install 'yafsdp_fn[hf]'") from error
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file}: no such file, though it was there when the model was opened") from error
    except SafetensorError as error:
        raise ValueError(
            f"{file}: damaged or cut short at {file.stat().st_size} bytes ({error}); copy it again"
        ) from error


class Writer:
    """Writes tensors to `directory` in the order they come, beginning a new file before one passes `max_shard_bytes`.

    names: all that will be added, to know how much room a header can take

    Used as a context. Leaving it puts all files under their final names, in place of any earlier model there; leaving
    it by an exception removes what was written and keeps the earlier model.
    """

    def __init__(self, directory: Path, names: Iterable[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected a positive number, got {max_shard_bytes}")
        self.directory, self.max_shard_bytes = directory, max_shard_bytes
        self.total_bytes = 0
        self._names = set(names)
        # 192: what an entry takes beside its name with 20 digits in every number, rounded up
        self._header_bytes = -(-sum(len(json.dumps(name)) + 192 for name in self._names) // 64) * 64 + 56
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

    def __enter__(self) -> Writer:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(PARTIAL.format("*")):  # by a process that was killed
            left.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        partial = [self.directory / PARTIAL.format(index) for index in range(len(self._headers))]
        if kind is not None:
            if self._file is not None:
                self._file.close()
            for file in partial:
                file.unlink()
            return
        self._finish_file()
        for stale in (
            self.directory / SINGLE,
            self.directory / INDEX,
            *self.directory.glob("model-*-of-*.safetensors"),
        ):
            stale.unlink(missing_ok=True)
        count = len(partial)
        final = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for file, name in zip(partial, final, strict=True):
            file.rename(self.directory / name)
        if count > 1:
            weight_map = {name: file for file, header in zip(final, self._headers, strict=True) for name in header}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _next_file(self) -> None:
        self._finish_file()
        self._file = (self.directory / PARTIAL.format(len(self._headers))).open("wb")
        self._file.seek(8 + self._header_bytes)
        self._headers.append({})
        self._at = 0

    def _finish_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._headers[-1]}).encode()
        assert len(header) <= self._header_bytes
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
        self._file.close()
        self._file = None
