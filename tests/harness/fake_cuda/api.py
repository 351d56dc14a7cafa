"""As much of `torch.cuda` as the library uses, over logical streams: events and waits go to the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.harness.fake_cuda.factories import patch_torch
from tests.harness.fake_cuda.kernels import patch_kernels
from tests.harness.fake_cuda.log import HOST
from tests.harness.fake_cuda.tensors import CUDA, DEVICE, THREAD, CudaTensor, Device, fresh_device
from yafsdp_fn.communication import cuda_streams
from yafsdp_fn.extras.offload import HostActivationBuffers


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
        DEVICE.asks("Event.query")
        # what was before it is over, and the host knows; what a watchdog's thread finds out, the host does not
        if self.number is not None and DEVICE.launches_here():
            DEVICE.look()
            DEVICE.log.wait(HOST, self.number)
        return True

    def synchronize(self) -> None:
        DEVICE.asks("Event.synchronize")
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


class CUDAGraph:
    """A user's. What is launched while it is captured runs at once; some calls of others end the capture.

    mode: in which it is captured; ended: what another thread has asked of the device meanwhile
    """

    mode = ended = ""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.mode = capture_error_mode
        DEVICE.capture = self

    def capture_end(self) -> None:
        DEVICE.capture = None
        if self.ended:
            raise RuntimeError(f"operation failed due to a previous error during capture: {self.ended}")


@contextlib.contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """As torch has it: the device is waited for, and cached memory given back, before the capture."""
    DEVICE.waits("torch.cuda.graph")
    into.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        into.capture_end()


class Generator(torch.Generator):
    """torch's, of the CPU, which says that it is on the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.where = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    device = property(lambda self: self.where)


@contextlib.contextmanager
def record_function(label: str) -> Iterator[None]:
    """Says what is under way, as to a profiler."""
    before = DEVICE.log.text
    DEVICE.log.text = label
    try:
        yield
    finally:
        DEVICE.log.text = before


def set_device(device: Any) -> None:
    THREAD.ready = True


class Driver:
    """libcuda.so.1"""

    @staticmethod
    def cuThreadExchangeStreamCaptureMode(mode: Any) -> int:
        THREAD.relaxed = mode._obj.value == 2
        return 0


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
        "synchronize": synchronize,
        "empty_cache": lambda: DEVICE.waits("torch.cuda.empty_cache"),
        "current_device": lambda: CUDA.index,
        "get_device_capability": lambda _: (9, 0),
        "set_device": set_device,
        "default_generators": (Generator(CUDA),),
        "is_current_stream_capturing": lambda: DEVICE.capture is not None,
        "graph_pool_handle": object,
        "_sleep": lambda cycles: None,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
    with fresh_device() as device, pytest.MonkeyPatch.context() as patch:
        for name, fake in names.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.profiler, "record_function", record_function)
        patch.setattr(cuda_streams, "cuda_driver", Driver)
        patch_kernels(patch)
        patch.setattr(
            HostActivationBuffers, "_plain", lambda self, x: type(x) is CudaTensor
        )  # its memory is all that there is
        patch_torch(patch)
        yield device
