"""Reads torch's pickles in checkpoints without executing them: `.metadata`, and the tensors in `.distcp` files.

A pickle names classes and functions, calls them, and sets attributes of the results, even of classes of this process.
Checkpoints are untrusted. Here a name stays a name: each object becomes a `Made`, which records the callable's name and
its arguments, and nothing of this process is called or changed. Names and operations that torch does not write there
are refused. The unpickler is Python's own: the one in C allocates whatever size it is told.

A few bytes can make an arbitrarily large nest of lists, since one list may be in a thousand places: values are never
shown, compared or hashed before their types are known.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Names = Set[tuple[str, str]]

_IN_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA: Names = {
    (_IN_METADATA, "Metadata"),
    (_IN_METADATA, "TensorStorageMetadata"),
    (_IN_METADATA, "BytesStorageMetadata"),
    (_IN_METADATA, "ChunkStorageMetadata"),
    (_IN_METADATA, "TensorProperties"),
    (_IN_METADATA, "MetadataIndex"),
    (_IN_METADATA, "StorageMeta"),
    (_IN_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
} | {
    # paths of the machine that wrote it
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": None,
}
_TENSOR: Names = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    *(("torch", name) for name in _STORAGES),
}

_OPERATIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT,
    pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_TUPLE,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.MEMOIZE,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.STACK_GLOBAL,
)  # fmt: skip
"""Operations that make plain values, as in the standard library; `_Unpickler` adds the others."""

MOST_AXES = 64
LONGEST = 200


class Name:
    """A class or function that a pickle asks for: its name only."""

    def __init__(self, text: str) -> None:
        self.text = text


class Made:
    """A placeholder for an object: the name of its constructor, the arguments, and the state it would get."""

    def __init__(self, kind: str, args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it has the operation {bytes([code])!r}, which torch does not write here")


class _Unpickler(pickle._Unpickler):
    """Unpickles without calling anything. names: those allowed, besides dtypes"""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch = _Operations({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPERATIONS})

    def __init__(self, data: bytes | bytearray, names: Names) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return Name(name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module:.80}.{name:.80}, which could run anything")

    def persistent_load(self, pid: Any) -> Any:
        """Returns a storage's entry in the tensor's file as it is."""
        return pid

    def make(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name:
            raise pickle.UnpicklingError(f"it calls a {type(name).__name__}")
        self.stack.append({} if name.text == "OrderedDict" else Made(name.text, args))

    def build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Made:
            raise pickle.UnpicklingError(f"it changes a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def append_items(self) -> None:
        self._extend(self.pop_mark())

    def append_item(self) -> None:
        self._extend([self.stack.pop()])

    def _extend(self, items: Sequence[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def set_items(self) -> None:
        items = self.pop_mark()
        self._update(items[::2], items[1::2])

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key], [value])

    def _update(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        # keys are texts, or objects hashed by identity: hashing a nest of tuples may take for ever
        if type(self.stack[-1]) is not dict or any(type(key) not in (str, Made) for key in keys):
            raise pickle.UnpicklingError("expected a table by names")
        self.stack[-1].update(zip(keys, values, strict=True))

    dispatch |= {
        pickle.REDUCE[0]: make,
        pickle.NEWOBJ[0]: make,
        pickle.BUILD[0]: build,
        pickle.APPEND[0]: append_item,
        pickle.APPENDS[0]: append_items,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


class _TensorUnpickler(_Unpickler):
    dispatch = _Operations(_Unpickler.dispatch)
    dispatch[pickle.BINPERSID[0]] = pickle._Unpickler.dispatch[pickle.BINPERSID[0]]


def numbers(value: Any) -> tuple[int, ...]:
    """Returns a `torch.Size`, or a tuple of numbers, as a tuple. Raises ValueError for others."""
    if is_a(value, "Size"):
        value = value.args[0] if type(value.args) is tuple and value.args else ()
    if type(value) is not tuple or len(value) > MOST_AXES:
        raise ValueError(f"expected numbers of elements or bytes, at most {MOST_AXES}, got a {type(value).__name__}")
    for each in value:
        if type(each) is not int or not 0 <= each < 2**62:
            shown = f"{each}"[:40] if type(each) in (str, int) else f"a {type(each).__name__}"
            raise ValueError(f"expected numbers of elements or bytes, got {shown}")
    return value


def is_a(value: Any, kind: str) -> bool:
    return isinstance(value, Made) and value.kind == kind


def fields(value: Any, kind: str) -> dict[str, Any]:
    """Returns the attributes that `value` would have, by name. Raises ValueError if it is not a `kind`."""
    if not is_a(value, kind):
        raise ValueError(f"expected a {kind}, got a {value.kind if isinstance(value, Made) else type(value).__name__}")
    return value.state if type(value.state) is dict else {}


def dtype_of(properties: Any) -> torch.dtype:
    """Returns the dtype in a TensorProperties, first in its state."""
    state = properties.state if is_a(properties, "TensorProperties") else None
    if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
        raise ValueError("expected a dtype")
    return state[0]


class Index(NamedTuple):
    """The index of a checkpoint. tensors: metadata by name; places: location of a part, by name and offsets"""

    tensors: dict[str, Any]
    places: dict[tuple[str, tuple[int, ...]], Any]


def read_metadata(data: bytes) -> Index:
    """Reads the index of a torch.distributed.checkpoint. Raises ValueError for any other text."""
    return _guarded(lambda: _index(_Unpickler(data, _METADATA).load()))


def _index(found: Any) -> Index:
    if not is_a(found, "Metadata"):
        raise ValueError(f"it holds a {type(found).__name__}, not an index")
    said = fields(found, "Metadata")
    tensors, stored = said.get("state_dict_metadata"), said.get("storage_data")
    if type(tensors) is not dict or type(stored) is not dict or any(type(name) is not str for name in tensors):
        raise ValueError("expected tables of tensors and of where they lie")
    places = {}
    for key, place in stored.items():
        index = fields(key, "MetadataIndex")
        if type(index.get("fqn")) is not str:
            raise ValueError("expected the name of a tensor")
        if index.get("offset") is not None:  # else of a pickled object
            places[index["fqn"], numbers(index["offset"])] = place
    return Index(tensors, places)


def read_tensor(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor that `torch.save` wrote as `data`, a view of these bytes. Raises ValueError for any other."""
    return _guarded(lambda: _tensor(data, dtype, tuple(shape)))


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
                if stream.readinto(out) != len(out) or stream.read(1):  # reading to the end compares checksums
                    raise ValueError(f"record {name} has another length")
            return out

        if "byteorder" in records and record("byteorder") != b"little":
            raise ValueError("it was written on a machine of other byte order")

        found = _TensorUnpickler(record("data.pkl"), _TENSOR).load()
        if not is_a(found, "_rebuild_tensor_v2"):
            raise ValueError("it is no tensor")
        (_, of, key, *_), first, *cut = found.args[:4]
        if type(of) is not Name or type(key) is not str:
            raise ValueError("it has no storage")
        kind, (offset,), (size, stride) = _STORAGES[of.text], numbers((first,)), map(numbers, cut)
        if (kind is not None and kind != dtype) or size != shape or len(stride) != len(shape):
            raise ValueError(f"it is {kind} {size}, expected {dtype} {shape}")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(record(f"data/{key}"), dtype=dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if last >= flat.numel():
            raise ValueError("it reaches beyond its storage")
        return flat.as_strided(shape, stride, offset)


def _guarded(read: Callable[[], T]) -> T:
    try:
        return read()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle or archive raises whatever its bytes lead to
        raise ValueError(f"{type(error).__name__}: {error}"[:LONGEST]) from error
