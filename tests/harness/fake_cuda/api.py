"""As much of `torch.cuda` as the library uses, over logical streams: events and waits go to the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from tests.harness.fake_cuda.log import HOST
from tests.harness.fake_cuda.tensors import COMPUTE, CUDA, DEVICE, Device, address, fresh_device, patch_torch
from yafsdp_fn.optim import fused


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.number = max(DEVICE.log.names) + 1 if number is None else number
        DEVICE.log.names.setdefault(self.number, f"stream {self.number}")

    @property
    def cuda_stream(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_event(self, event: Event) -> None:
        if event.number is not None:  # CUDA does not wait for what was not recorded
            DEVICE.look()
            DEVICE.log.wait(self.number, event.number)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        DEVICE.sync("Stream.synchronize")
        DEVICE.drain(self.number)


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.number: int | None = None
        self.stream: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        DEVICE.look()
        self.stream = DEVICE.stream if stream is None else stream.number
        self.number = DEVICE.log.record(self.stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream(number=DEVICE.stream)).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        DEVICE.sync("Event.synchronize")
        if self.number is not None:
            DEVICE.look()
            DEVICE.log.wait(HOST, self.number)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@contextlib.contextmanager
def stream(of: Stream | None) -> Iterator[None]:
    before = DEVICE.stream
    DEVICE.stream = before if of is None else of.number
    try:
        yield
    finally:
        DEVICE.stream = before


class Generator(torch.Generator):
    """torch's, of the CPU, which says that it is on the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.where = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    device = property(lambda self: self.where)  # type: ignore[assignment]


class Freed(RuntimeError):
    """A graph was replayed that uses memory which is gone."""


class External:
    """A tensor that a graph found there: known by its address, as a graph has it."""

    def __init__(self, host: Tensor) -> None:
        self._outline = host.dtype, tuple(host.shape), host.stride(), int(host.storage_offset())
        self._weak: int = host.untyped_storage()._weak_ref()

    def found(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        if storage is None:
            raise Freed("a graph uses memory that has been freed since its capture")
        dtype, shape, stride, offset = self._outline
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Tape:
    """Operations on memory as it was at the capture. What they made is the graph's own; the rest is not kept alive."""

    def __init__(self) -> None:
        self._ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """`func` is about to run: what it overwrites is kept for `undo`."""
        for x in _tensors((args, kwargs)):
            if func._schema.is_mutable and address(x) not in self._own | self._before.keys():
                self._before[address(x)] = x.untyped_storage(), x.untyped_storage().clone()
        apart: Any = optree.tree_map(
            lambda x: External(x) if isinstance(x, Tensor) and address(x) not in self._own else x, (args, kwargs)
        )
        given = {address(x) for x in _tensors((args, kwargs))}
        self._ops.append((func, *apart, []))
        self._given = given

    def made(self, outs: list[Tensor]) -> None:
        fresh = [x for x in outs if x.numel() and address(x) not in self._given]
        self._own.update(map(address, fresh))
        self._ops[-1][3].extend(outs)

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}
        # views of what is not its own would keep that alive
        self._ops = [
            (func, args, kwargs, [x if address(x) in self._own else None for x in outs])
            for func, args, kwargs, outs in self._ops
        ]

    def replay(self) -> None:
        DEVICE.look()
        with torch.no_grad():
            for func, args, kwargs, outs in self._ops:
                args, kwargs = optree.tree_map(lambda x: x.found() if isinstance(x, External) else x, (args, kwargs))
                again = _tensors(func(*args, **kwargs))
                for position, argument in enumerate(func._schema.arguments):
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    writes = argument.alias_info is not None and argument.alias_info.is_write
                    for x in _tensors(value):
                        DEVICE.uses(x, writes, f"replayed {func}")
                for x, new in zip(outs, again, strict=True):
                    if x is not None and x.data_ptr() != new.data_ptr():
                        x.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class CUDAGraph:
    tape: Tape

    def replay(self) -> None:
        self.tape.replay()


@contextlib.contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Stream | None = None, **options: Any) -> Iterator[None]:
    """Captures. Where it fails, nothing is left behind, as in torch 2.13."""
    into.tape = DEVICE.tape = Tape()
    try:
        yield
    finally:
        DEVICE.tape = None
        into.tape.undo()


@contextlib.contextmanager
def record_function(label: str) -> Iterator[None]:
    """Says what is under way, as to a profiler."""
    before, DEVICE.log.text = DEVICE.log.text, label
    try:
        yield
    finally:
        DEVICE.log.text = before


def synchronize(device: Any = None) -> None:
    DEVICE.sync("torch.cuda.synchronize")
    for number in list(DEVICE.log.names):
        if number != HOST:
            DEVICE.drain(number)


@contextlib.contextmanager
def fake_cuda() -> Iterator[Device]:
    """Inside, `cuda:0` is there, with streams that are run in the order of the host and judged by the log."""
    names: dict[str, Callable[..., Any] | Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: Stream(number=DEVICE.stream),
        "default_stream": lambda device=None: Stream(number=COMPUTE),
        "synchronize": synchronize,
        "current_device": lambda: CUDA.index,
        "default_generators": (Generator(CUDA),),
        "is_current_stream_capturing": lambda: DEVICE.tape is not None,
        "graph_pool_handle": object,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
    with fresh_device() as device, pytest.MonkeyPatch.context() as patch:
        for name, fake in names.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.profiler, "record_function", record_function)
        patch.setattr(fused, "copying_kernel", lambda device: None)  # Triton would look for a driver
        patch_torch(patch)
        yield device
