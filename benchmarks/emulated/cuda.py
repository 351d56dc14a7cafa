"""Runs collectives on CUDA as kernels that take the modelled time, on a stream; the host never waits.

    async_op=False    on the current stream
    async_op=True     on a stream of the group's own; `wait` makes the current stream wait

With triton, kernels watch the GPU's global timer, and simultaneous ones share a link as in `simulate`; with
`move_bytes` they copy as many bytes through the GPU's memory as travel. Without triton `torch.cuda._sleep` counts
cycles, each collective as if it were alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated.lanes import Collective
from yafsdp_fn.util.on_gpu import kernels_run_on

SCRATCH_BYTES = 128 << 20
"""Bytes of the source of `move_bytes`, and of its target: more than any cache holds."""


class CudaWire:
    """Takes the modelled time on one device; shared by all groups. Raises RuntimeError for `move_bytes`
    without triton."""

    def __init__(self, *, move_bytes: bool) -> None:
        self._kernels: Any = None
        self._users = torch.zeros(3, dtype=torch.int32, device="cuda")
        if kernels_run_on(self._users):
            from benchmarks.emulated import kernels

            self._kernels = kernels
            self._bytes = SCRATCH_BYTES if move_bytes else 0
            self._scratch = torch.empty(2, self._bytes // 4, dtype=torch.float32, device="cuda")
            torch.cuda.current_stream().synchronize()  # once: other streams use these, and nothing else orders them
        elif move_bytes:
            raise RuntimeError("emulate(move_bytes=True) needs triton, which this machine has not")
        else:
            self._cycles = _cycles_per_second()

    def hold(self, todo: Collective) -> None:
        """Enqueues the work of `todo` on the current stream, with kernels that make it last as long as its phases."""
        if self._kernels is None:
            _leave(todo)
            torch.cuda._sleep(int(sum(phase.seconds for phase in todo.phases) * self._cycles))  # type: ignore[no-untyped-call]
            return
        mark = torch.empty(1, dtype=torch.int64, device="cuda")
        self._kernels.mark(mark)
        _leave(todo)  # within the modelled time, unless it takes longer
        for phase in todo.phases:
            moved = todo.nbytes if self._bytes and phase.resource != "latency" else 0
            self._kernels.hold(mark, self._users, phase, self._scratch, moved)


def _leave(todo: Collective) -> None:
    for each in todo.work:
        each()


def _cycles_per_second() -> float:
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for event in (start, end):  # the first sleep wakes the clock up
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        event.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return cycles / milliseconds * 1e3


class CudaWork(dist.Work):
    """A collective on a stream; `wait` is a wait of the current stream."""

    def __init__(self, end: torch.cuda.Event, outs: list[Tensor], aside: torch.cuda.Stream) -> None:
        super().__init__()
        self._end, self._outs, self._aside = end, outs, aside

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Returns a completed future; whoever waits for it waits on a stream, since it knows the device."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[torch.cuda.current_device()])
        with torch.cuda.stream(self._aside):  # the future takes what the current stream has to do for its own work
            self._aside.wait_event(self._end)
            future.set_result(self._outs)
        return future


class CudaLane:
    """A group's collectives on CUDA: each waits for the one before it, whatever their streams."""

    def __init__(self, wire: CudaWire) -> None:
        self._wire = wire
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # for futures alone; one each would run through torch's pool of 32, and make streams of others wait
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def run(self, todo: Collective) -> dist.Work:
        current = torch.cuda.current_stream()
        stream = self._stream if todo.asynchronous else current
        tensors = [*todo.outs, *todo.inputs]
        if todo.asynchronous:
            stream.wait_stream(current)
            for tensor in tensors:
                tensor.record_stream(stream)
        with torch.cuda.stream(stream), torch.no_grad(), torch.profiler.record_function(f"emulated::{todo.name}"):
            if self._last is not None:
                stream.wait_event(self._last)
            self._wire.hold(todo)
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last.record()
        return CudaWork(self._last, todo.outs, self._aside)

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()
