"""Memory, allocations and collectives of one contender, alone in its process, in steps that nobody times.

    build; warm up; trim the heap; reset the peak
    a few steps                                     -> peak resident memory (CPU), peak allocated memory (CUDA)
    one step under a profiler of all threads        -> collectives and their bytes
    one step under a profiler of tensor memory      -> allocations of weight size, peak of live tensors

Resident memory is what the machine pays: it holds Python, torch, gloo's buffers and what malloc keeps. Live tensors
are exact and repeatable, and leave all that out, so both are reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import dataclasses
import gc
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

WEIGHT_SIZE = 2 << 20
"""Bytes from which an allocation counts as one of a weight, a gradient or a flat buffer."""

STEP = "bench.step"


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of one training step of one contender, on one rank."""

    peak_memory_bytes: int
    """Peak resident memory of the process over training steps; on CUDA the allocator's peak."""
    peak_memory_of: str
    """The source of that figure."""
    peak_tensor_bytes: int
    """Largest sum of live tensors, parameters and optimizer state included."""
    weight_size_allocations: int
    """Allocations of at least `WEIGHT_SIZE` in one step."""
    weight_size_allocated_bytes: int
    collectives: dict[str, dict[str, int]]
    """The collectives by kind: count, bytes of the whole (unsharded) message, and what of it this rank sends."""


class ResidentPeak:
    """Peak resident memory of this process since `reset`, from the kernel's high-water mark."""

    status = Path("/proc/self/status")

    def reset(self) -> None:
        gc.collect()
        libc = ctypes.util.find_library("c")
        if libc is not None and hasattr(trim := ctypes.CDLL(libc), "malloc_trim"):
            trim.malloc_trim(0)  # what building left behind is not part of a step
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.source = "VmHWM over training steps"
        except OSError:
            self.source = "VmHWM over the life of the process"

    def read(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", self.status.read_text())
        if found is None:
            raise RuntimeError(f"{self.status} has no VmHWM line: peak memory needs Linux; run with --no-counts")
        return int(found[1]) << 10


class ThreadAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts fresh storages of weight size in Python threads, which torch's memory profiler cannot see.

    A dispatch mode belongs to one thread; `watch_threads` enters one in every thread that starts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for t in tensors(out):
            storage = t.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() >= WEIGHT_SIZE:
                self.sizes.append(storage.nbytes())
        return out


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def watch_threads() -> Iterator[ThreadAllocations]:
    """Inside, every Python thread that starts counts its allocations into the mode yielded, as long as it lives."""
    mode = ThreadAllocations()
    run = threading.Thread.run

    def watched(self: threading.Thread) -> None:
        with mode:
            run(self)

    threading.Thread.run = watched  # type: ignore[method-assign]
    try:
        yield mode
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


def no_scratch() -> Any:
    """Inside, memory of the CPU's allocator is that of tensors. oneDNN's kernels are off: they take scratch from it,
    more or less by the processor (with AMX, 3% of a small model). Products in bf16 are slow then."""
    return torch.backends.mkldnn.flags(enabled=False)


def activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])


def allocations(prof: profile, device: torch.device) -> list[int]:
    """Bytes of every allocation (positive) and release (negative) from the first `STEP` on, in order of time.

    The first item is what was live by then, of all that was made under the profiler. The release of a block made
    before is left out: torch remembers its size from an earlier profile, or that of another block at its address.
    """
    begins: list[int] = []
    memory: list[Any] = []
    todo = list(prof.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            memory.append(event)
        elif event.name == STEP:
            begins.append(event.start_time_ns)
    if not begins:
        raise RuntimeError(f"the profiler lost the range {STEP}: no allocations to report")
    made: dict[int, int] = {}
    live = 0
    out = []
    for event in sorted(memory, key=lambda e: e.start_time_ns):
        block = event.extra_fields
        if block.device.type != device.type:
            continue
        if block.alloc_size > 0:
            change = block.alloc_size - made.pop(block.ptr, 0)  # an older block there: its release was lost
            made[block.ptr] = block.alloc_size
        else:
            change = -made.pop(block.ptr, 0)
        if event.start_time_ns >= min(begins):
            out.append(change)
        else:
            live += change
    return [live, *out]


def step_allocations(step: Callable[[], object], device: torch.device, mode: ThreadAllocations) -> list[int]:
    """Sizes of the allocations of weight size in one step, in this thread, autograd's and Python's."""
    mode.sizes.clear()
    with no_scratch(), profile(activities=activities(device), profile_memory=True) as prof, record_function(STEP):
        step()
    return [size for size in [*allocations(prof, device)[1:], *mode.sizes] if size >= WEIGHT_SIZE]


def tensor_peak(build: Callable[[], Callable[[int], object]], device: torch.device, warmup: int) -> int:
    """Builds the contender again under the memory profiler, so that all that lives is seen being made.

    The peak is taken over the steps after the warm-up: what building needs for a moment does not count.
    """
    with profile(activities=activities(device), profile_memory=True) as prof:
        step = build()
        for i in range(warmup):
            step(i)
        gc.collect()
        for i in range(2):
            with no_scratch(), record_function(STEP):
                step(warmup + i)
    return max(itertools.accumulate(allocations(prof, device)))


def step_collectives(step: Callable[[], object], scratch: Path, group: int) -> dict[str, dict[str, int]]:
    """The collectives of one step, over all threads."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=every_thread) as prof,
        record_function(STEP),
    ):
        step()
    prof.export_chrome_trace(str(scratch))
    return collectives(scratch, inside=STEP, group=group)


def count(
    build: Callable[[], Callable[[int], object]], device: torch.device, scratch: Path, warmup: int, group: int
) -> Counts:
    """`build()` makes the contender and returns its step, a function of the step's number; group: as in `trace`."""
    with watch_threads() as mode:
        step = build()
        for i in range(warmup):
            step(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        peak = ResidentPeak()
        peak.reset()
        for i in range(warmup, warmup + 3):
            step(i)
        memory = peak.read()
        source = peak.source
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
            source = "torch.cuda.max_memory_allocated over training steps"
        collectives = step_collectives(lambda: step(warmup + 3), scratch, group)  # noqa: F821 (deleted below)
        sizes = step_allocations(lambda: step(warmup + 4), device, mode)  # noqa: F821 (deleted below)
    del step
    gc.collect()
    return Counts(
        peak_memory_bytes=memory,
        peak_memory_of=source,
        peak_tensor_bytes=tensor_peak(build, device, warmup),
        weight_size_allocations=len(sizes),
        weight_size_allocated_bytes=sum(sizes),
        collectives=collectives,
    )


KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
"""torch's c10d operators. A receive is some rank's send, and is not counted twice."""

NOT_TRAFFIC = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_"}

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "int64_t": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short int": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


SCALARS_BYTES = 64
"""Messages below this size are a step's few scalars (loss, weight, norm): counted, but not in what is sent."""


def collectives(path: Path, *, inside: str, group: int) -> dict[str, dict[str, int]]:
    """Count, bytes of whole messages and bytes that a rank sends, by kind, of those that start within `inside`.

    group: ranks that all-reduces and all-to-alls run over, which a trace does not tell

    Under a dispatch mode (see `counting.ThreadAllocations`) an operator calls itself once more: the
    inner one is left out.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    (span,) = (e for e in events if e["name"] == inside and e.get("cat") != "gpu_user_annotation")
    out: dict[str, dict[str, int]] = {}
    ends: dict[tuple[int, str], float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        if not event["name"].startswith("c10d::") or not span["ts"] <= event["ts"] <= span["ts"] + span["dur"]:
            continue
        name = event["name"].removeprefix("c10d::")
        end = event["ts"] + event["dur"]
        if name in NOT_TRAFFIC or end <= ends.get((event["tid"], name), -math.inf):
            continue
        ends[event["tid"], name] = end
        if name not in KINDS:
            raise RuntimeError(f"the trace has the operator {event['name']}, which benchmarks/counting.py lacks")
        entry = out.setdefault(KINDS[name], {"count": 0, "bytes": 0, "sent": 0})
        sizes = argument_bytes(event["args"])
        entry["count"] += 1
        entry["bytes"] += max(sizes)
        entry["sent"] += sent_bytes(KINDS[name], sizes, group)
    return dict(sorted(out.items()))


def argument_bytes(args: dict[str, Any]) -> list[int]:
    """Bytes of each tensor argument: of a gather's output and input, of a reduction's."""
    found = []
    for dims, kind in zip(args["Input Dims"], args["Input type"], strict=True):
        if kind == "TensorList":
            # The trace gives a list's shapes but no dtype; whoever reduces lists here (DDP's buckets) reduces fp32.
            found.append(4 * sum(numel(d) for d in dims))
        elif kind in ITEM_BYTES:
            found.append(ITEM_BYTES[kind] * math.prod(dims))
    return found


def sent_bytes(kind: str, sizes: list[int], group: int) -> int:
    """Bytes that a rank has to send: of a gather or a reduction the other ranks' part of the message, of an all-reduce
    twice that. Implementations may send more (gloo's reduce-scatter is an all-reduce)."""
    whole = max(sizes)
    if whole < SCALARS_BYTES:
        return 0
    if kind in ("all_gather", "reduce_scatter"):
        return whole - min(sizes)  # a rank's own part is the other argument
    return {"all_reduce": 2 * whole * (group - 1) // group, "all_to_all": whole * (group - 1) // group}.get(kind, whole)


def numel(dims: Any) -> int:
    """Elements of a shape, or of a list of shapes."""
    if dims and isinstance(dims[0], list):
        return sum(numel(d) for d in dims)
    return math.prod(dims)
