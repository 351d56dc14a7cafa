"""What torch pickles into checkpoints, read so that nothing of it runs: `.metadata`, the tensors in `.distcp` files.

A pickle names functions and calls them; checkpoints come from other people. Here a name that is not in a short list
ends the reading. The unpickler is the one in Python: that in C makes room for whatever size a pickle asks for.
"""

import io
import pathlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

Names = Mapping[tuple[str, str], Any]

# the names that such files hold: torch cannot drop those that begin with _ either
_METADATA: Names = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        OrderedDict,
    )
} | {
    # paths of the machine that wrote it; read as what they are made of, since they mean nothing here
    (module, name): pathlib.PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}


class _Unpickler(pickle._Unpickler):
    """names: what a pickle may ask for, besides dtypes and layouts; storage: what a persistent id becomes"""

    def __init__(self, data: bytes | bytearray, names: Names, storage: Callable[[Any], Any] | None = None) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._storage = names, storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda text: _of_torch(text.removeprefix("torch."))
        if module == "torch":
            return _of_torch(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run anything")

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("it refers to a storage")
        return self._storage(pid)


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise pickle.UnpicklingError(f"it asks for torch.{name}, which could run anything")
    return found


def read_metadata(data: bytes) -> metadata.Metadata:
    """The index of a checkpoint of torch.distributed.checkpoint. Raises ValueError for any other text."""
    found = _guarded(lambda: _Unpickler(data, _METADATA).load())
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"it holds a {type(found).__name__}, not an index")
    return found


def read_tensor(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that `torch.save` wrote as `data`, a view of these bytes. Raises ValueError for any other."""
    found: Tensor = _guarded(lambda: _tensor(data, dtype, tuple(shape)))
    return found


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}

        def record(name: str) -> bytearray:
            info = records.get(name)
            # compressed, it could be any number of times as large
            if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise ValueError(f"there is no plain record {name}")
            out = bytearray(info.file_size)
            with io.BufferedReader(archive.open(info)) as stream:  # type: ignore[type-var]
                if stream.readinto(out) != len(out) or stream.read(1):  # at the end it compares checksums
                    raise ValueError(f"record {name} has another length")
            return out

        if "byteorder" in records and record("byteorder") != b"little":
            raise ValueError("it was written on a machine of other byte order")

        def rebuild(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
            return storage, offset, tuple(size), tuple(stride)

        names = {
            ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "UntypedStorage"): None,
        } | {("torch", f"{word}Storage"): kind for word, kind in _STORAGES.items()}
        (_, kind, key, *_), offset, size, stride = _Unpickler(record("data.pkl"), names, lambda pid: pid).load()
        if (kind is not None and kind != dtype) or size != shape or len(stride) != len(shape):
            raise ValueError(f"it is {kind} {size}, expected {dtype} {shape}")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(record(f"data/{key}"), dtype=dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if min(offset, *stride, 0) < 0 or last >= flat.numel():
            raise ValueError("it reaches beyond its storage")
        return flat.as_strided(shape, stride, offset)


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


def _guarded(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle or archive raises whatever its bytes lead to
        raise ValueError(f"{type(error).__name__}: {error}") from error
