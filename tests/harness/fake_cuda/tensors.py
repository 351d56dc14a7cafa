"""Tensors that say they are on `cuda:0`: memory of the CPU, with every operation on it seen.

Python sees the device; torch's C++ sees a CPU, so that everything runs in one thread, autograd too. Mixing them with
tensors of the CPU raises, as it does on a GPU, and what would make the host wait is told to `DEVICE`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.harness.fake_cuda.log import HOST, Log

CUDA = torch.device("cuda", 0)
COMPUTE = 1
"""The stream that is current at the beginning."""

EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
LOOKS = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "is_nonzero", "_local_scalar_dense"}
"""Operations whose results have a shape or a value that the host needs."""


THREAD = threading.local()
"""What a thread has said. ready: which device is its own; relaxed: captures of others do not concern it"""


class HostSync(RuntimeError):
    """The host would wait for the device."""


class Device:
    """The one device. stream: the current one; capture: the graph that is being captured

    syncs: what made the host wait, where it may; may_sync: whether it may
    strangers: what threads did that had not said that this is their device
    launched: operations that work on memory, in order; a collective is one
    """

    def __init__(self) -> None:
        self.log = Log()
        self.stream = COMPUTE
        self.may_sync = True
        self.capture: Any = None
        self.syncs: list[str] = []
        self.pinned: set[int] = set()
        self._lock = threading.RLock()  # of memory: threads of streams and watchdogs look, too
        self._alive: dict[int, StorageWeakRef] = {}
        self._kernels: set[str] = set()  # loaded
        self.strangers: list[str] = []
        self.launched: list[str] = []
        THREAD.ready = THREAD.launches = True

    def launches_here(self) -> bool:
        """Whether this thread is the one that launches and captures."""
        return getattr(THREAD, "launches", False)

    def asks(self, what: str) -> None:
        """A thread asks how far the device is: not without a word before, and not while another one captures."""
        what = self.touches(what)
        own = self.launches_here() or getattr(THREAD, "relaxed", False)
        if self.capture is not None and self.capture.mode == "global" and not own:
            self.capture.ended = what

    def touches(self, what: str) -> str:
        """A thread does something with its current device, which is number 0 until it says otherwise."""
        what = f"{what} in {threading.current_thread().name}"
        if not getattr(THREAD, "ready", False):
            self.strangers.append(what)
        return what

    def waits(self, cause: str) -> None:
        """The host waits for all that it has launched, for this once."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {cause}")
        self.log.sync(cause)

    def loads(self, kernel: str) -> None:
        """A kernel runs, which is loaded the first time."""
        self.touches(kernel)
        if kernel not in self._kernels:
            self._kernels.add(kernel)
            self.log.sync(f"the first use of {kernel}")

    def sync(self, what: str) -> None:
        self.waits(what)
        self.syncs.append(what)
        if not self.may_sync:
            raise HostSync(f"the host waits for the device: {what}")

    def drain(self, stream: int | None = None) -> None:
        """The host has waited for a stream, the current one."""
        self.look()
        self.log.add("drain", self.stream if stream is None else stream)

    # ---- memory

    def made(self, host: Tensor, stream: int | None = None) -> None:
        """`host` is new memory, of the current stream if no other is given."""
        with self._lock:
            key = address(host)
            if key not in self._alive:
                self._alive[key] = StorageWeakRef(host.untyped_storage())
                self.log.add("make", self.stream if stream is None else stream, key)

    def look(self) -> None:
        """Tells the log of what has been freed; before anything else is said to it."""
        with self._lock:
            gone = [key for key, storage in self._alive.items() if storage.expired()]
            for key in gone:
                del self._alive[key]
                self.log.add("free", HOST, key)

    def uses(self, host: Tensor, writes: bool, op: str, stream: int | None = None) -> None:
        for start, stop in spans(host):
            self.log.use(self.stream if stream is None else stream, address(host), start, stop, writes, op)


DEVICE = Device()


@contextmanager
def fresh_device() -> Iterator[Device]:
    """A device that nothing has used, in the place of the one that there was."""
    before = dict(vars(DEVICE))
    vars(DEVICE).update(vars(Device()))
    try:
        yield DEVICE
    finally:
        vars(DEVICE).update(before)


def address(host: Tensor) -> int:
    return int(host.untyped_storage()._cdata)


def spans(host: Tensor) -> list[tuple[int, int]]:
    """The bytes of its storage that a tensor lies in; rows apart, where they lie apart."""
    if not host.numel():
        return []
    rows = not host.is_contiguous() and 0 < max(host.stride()) == host.stride(0) and host.shape[0] <= 64
    return [span for row in host for span in spans(row)] if rows else [_hull(host)]


def _hull(host: Tensor) -> tuple[int, int]:
    first = host.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))
    return int(first) * host.itemsize, (int(last) + 1) * host.itemsize


class CudaTensor(Tensor):
    """On the fake device. host: where its memory really is"""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=int(host.storage_offset()), dtype=host.dtype
        )
        made.host = host
        DEVICE.made(host)
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        DEVICE.look()
        DEVICE.log.add("keep", stream.number, address(self.host))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return to_host(self)

    def tolist(self) -> Any:
        return to_host(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **kwargs: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            out = to_host(self)
            return out if dtype is None else out.to(dtype)
        rest = {} if memory_format is None else {"memory_format": memory_format}
        return torch._C.TensorBase.to(
            self, dtype or self.dtype, non_blocking=non_blocking, copy=bool(kwargs.get("copy", False)), **rest
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def to_host(tensor: CudaTensor) -> Tensor:
    DEVICE.sync("a copy to the host")
    DEVICE.uses(tensor.host, False, "copy to host")
    DEVICE.drain()
    return tensor.detach().host.clone()


def device_tensors(tree: Any) -> list[CudaTensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, CudaTensor)]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    DEVICE.look()
    known: dict[int, CudaTensor] = {id(x.host): x for x in device_tensors((args, kwargs))}
    storages = {address(x.host) for x in known.values()}
    _check(name, args, kwargs)
    unwrapped = optree.tree_map(lambda x: x.host if isinstance(x, CudaTensor) else x, (args, kwargs))
    out = func(*unwrapped[0], **unwrapped[1])
    outs = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
    fresh = [x for x in outs if address(x) not in storages]
    given = list(accesses(func, args, kwargs))
    view = bool(outs) and not fresh and not any(writes for _, writes in given)
    traced = any(isinstance(x, FakeTensor) for x in (*outs, *(x for x, _ in given), *(x.host for x in known.values())))
    runs = not view and name not in EMPTY and name != "set_" and not traced
    for x in fresh:
        DEVICE.made(x)
    if runs:
        DEVICE.loads(name)
        _say(name, given, fresh)

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type != "cpu":
            return x
        return known[id(x)] if id(x) in known else CudaTensor(x)

    return optree.tree_map(wrap, out)


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what a GPU would, and tells of what makes the host wait."""
    others = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, CudaTensor)]
    if name in ("copy_", "_foreach_copy_"):
        if others and not (args[-1] is True or kwargs.get("non_blocking")):
            DEVICE.sync(f"{name} between host and device")
        elif others and any(address(x) not in DEVICE.pinned for x in others):
            DEVICE.sync(f"{name} between the device and memory of the host that is not pinned")
        return
    mixed = [x for x in others if x.ndim and x.device.type == "cpu"]
    if mixed:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu {tuple(mixed[0].shape)}"
        )
    if name.startswith("_fused") and any(x.device.type == "cpu" for x in others):
        raise RuntimeError(f"{name}: its kernel reads scalars on the device, and one is on the cpu")
    if name in LOOKS:
        DEVICE.sync(name)
        DEVICE.drain()
    masks = name in ("index", "index_put", "index_put_") and any(
        x.dtype == torch.bool for x in device_tensors(args[1] if len(args) > 1 else kwargs.get("indices"))
    )
    if masks:
        DEVICE.sync(f"{name} by a mask")


def accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation is given, and whether it writes to them, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in optree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, writes


def _say(name: str, given: list[tuple[Tensor, bool]], fresh: list[Tensor]) -> None:
    """Tells the log of reads and writes."""
    DEVICE.launched.append(name)
    for tensor, writes in given:
        host = tensor.host if isinstance(tensor, CudaTensor) else tensor
        if isinstance(tensor, CudaTensor) or address(host) in DEVICE.pinned:
            DEVICE.uses(host, writes, name)
    for x in fresh:
        DEVICE.uses(x, True, name)
