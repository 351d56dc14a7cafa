"""ya.planner.calibrate: measures this machine by microbenchmarks of a few seconds.

    print(ya.planner.calibrate())        # Cluster(name='here', gpus_per_node=2, ...): a preset to paste

kernels, memory        a norm and a gate, forward and backward, of one row and of many: what a kernel takes, and a byte
matmul                 the three products of a linear layer and its backward, without what kernels and bytes take
attention              causal, forward and backward
host                   a copy from the GPU to pinned memory; on the CPU, a copy through memory
formats                int8 by blocks, encoded and decoded, without their bytes
links                  gathers and reductions of two sizes: what a further byte takes is the bandwidth, the rest latency
contention             products beside running gathers and reductions, and these beside products, over the same alone

Work is counted as in a trace (`tracing/counter.py`): a figure is what makes the count take the measured time.
Ranks begin each measurement together, and on the CPU it lasts a while: those that share a core, or the memory, get the
part of it that they get in a step.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from yafsdp_fn.communication import formats
from yafsdp_fn.communication.cuda_streams import CudaEvent, CudaStream
from yafsdp_fn.communication.groups import group_of
from yafsdp_fn.communication.store import new_group
from yafsdp_fn.communication.streams import HostEvent, HostStream
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.program.measured import Moved
from yafsdp_fn.tracing.attention import attention_flops
from yafsdp_fn.tracing.counter import moved_by
from yafsdp_fn.util.torch_private import default_group, timeout_of

TIMES = 5
"""Measurements of each figure, after a warm-up; the median counts. The same number on every rank."""
WINDOW, REPEATS = 0.06, 64
"""Seconds that a measurement should last, longer than turns of threads that share a core; the most repetitions."""


class Sizes(NamedTuple):
    """The sizes of the measurements. rows, width: of activations, whose products are with twice the width; moved: rows
    of what is no product, more than caches hold; sequence: of attention; copied, small, large: bytes"""

    dtype: torch.dtype
    rows: int
    moved: int
    width: int
    sequence: int
    copied: int
    small: int
    large: int


SIZES = {
    "cpu": Sizes(torch.float32, 512, 1024, 1024, 256, 1 << 26, 1 << 16, 1 << 25),
    "cuda": Sizes(torch.bfloat16, 8192, 8192, 8192, 8192, 1 << 29, 1 << 20, 1 << 28),
}
HEADS, HEAD_DIM = 8, 64


class Link(NamedTuple):
    """A measured link. seconds: of a collective of nothing; bandwidth: bytes/s of the bus, as nccl-tests count it"""

    seconds: float
    bandwidth: float


def calibrate(
    name: str = "here", *, device: Literal["cuda", "cpu"] | None = None, per_node: int | None = None
) -> Cluster:
    """Measures this machine and returns it as a cluster called `name`, the same one on every rank.

    Links are measured between the ranks of the process group: call `ya.mesh()` first, and this on every rank. The
    slowest rank counts. Without a second rank or node, links are guessed: those of one rank as fast as copies through
    its memory, and a network as fast as the links inside the node; `Cluster.replace` sets better figures.

    device: default cuda if available; the current GPU, as `ya.mesh` sets it
    per_node: ranks that share a node; default LOCAL_WORLD_SIZE (torchrun's), else the GPUs of this machine, all ranks
        on the CPU

    Raises ValueError for another device, and if ranks do not fill nodes of `per_node`.

    >>> here = ya.planner.calibrate("here", device="cpu")
    >>> here.matmul_flops > 0, here.memory_bandwidth > 0
    (True, True)
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in SIZES:  # an index would be measured against the streams of another GPU
        raise ValueError(f"calibrate: device={device!r}, expected 'cuda' or 'cpu'")
    sizes = SIZES[kind]
    world = dist.get_world_size() if dist.is_initialized() else 1
    default = torch.cuda.device_count() if kind == "cuda" else world
    node = int(os.environ.get("LOCAL_WORLD_SIZE", default)) if per_node is None else per_node
    if node < 1 or (world > node and world % node):
        raise ValueError(f"calibrate: {world} ranks do not fill nodes of per_node={node}; give a divisor of {world}")
    x = torch.randn(sizes.rows, sizes.width, dtype=sizes.dtype, device=kind)
    up = torch.randn(2 * sizes.width, sizes.width, dtype=sizes.dtype, device=kind)
    out = x @ up.t()
    grad_up = torch.empty_like(up)
    grad_x = torch.empty_like(x)

    def products() -> None:
        torch.mm(x, up.t(), out=out)
        torch.mm(out.t(), x, out=grad_up)
        torch.mm(out, up, out=grad_x)

    q = torch.randn(1, HEADS, sizes.sequence, HEAD_DIM, dtype=sizes.dtype, device=kind, requires_grad=True)

    def attend() -> None:
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.autograd.grad(out, q, out)

    source = torch.ones(sizes.copied, dtype=torch.uint8, device=kind)
    latency, memory = _kernels(sizes, kind)
    attention = _seconds(attend, kind)
    with torch.no_grad():
        three = _seconds(products, kind)
        copy = _seconds(partial(torch.empty_like(source).copy_, source), kind)
        inside, between, contention = _links(world, node, three, products, sizes, kind)
        to_host = copy
        if kind == "cuda":
            pinned = torch.empty_like(source, device="cpu", pin_memory=True)
            to_host = _seconds(partial(pinned.copy_, source, non_blocking=True), kind)
        formats_s = _formats(sizes, kind, memory)
    counted = 3 * ((x.nbytes + up.nbytes + out.nbytes) / memory + latency)  # as costs have it, beside the FLOPs
    inside = inside or Link(0.0, memory / 2)
    network = between or inside
    local = min(node, world)
    nodes = max(1, world // node)
    node_latency = network_latency = inside.seconds / max(1, local - 1)
    if nodes > 1:  # a ring over nodes has hops of both kinds
        network_latency = max(0.0, network.seconds - (world - nodes) * node_latency) / (nodes - 1)
    figures = {
        "matmul_flops": 6 * x.numel() * len(up) / max(three - counted, three / 2),
        "attention_flops": attention_flops(q, q, q, "first") * 7 / 2 / attention,
        "memory_bandwidth": memory,
        "memory_bytes": _memory_bytes(kind, local),
        "node_bandwidth": inside.bandwidth,
        "network_bandwidth": network.bandwidth,
        "node_latency": node_latency,
        "network_latency": network_latency,
        "host_bandwidth": sizes.copied / to_host,
        "contention": contention[0],
        "link_contention": contention[1],
        "kernel_latency": latency,
        "format_seconds": formats_s,
    }
    every: list[Any] = [figures] * world
    if world > 1:
        dist.all_gather_object(every, figures)
    agreed: dict[str, Any] = {key: _slowest(key, [theirs[key] for theirs in every]) for key in figures}
    return Cluster(name=name, gpus_per_node=node, host_computes=kind == "cpu", **agreed)


def _kernels(sizes: Sizes, kind: str) -> tuple[float, float]:
    """Returns seconds that each kernel takes on the host, where that computes, and bytes/s of those that are no
    products."""

    found = list[tuple[float, Moved]]()
    for rows in (1, sizes.moved):
        x = torch.ones(rows, sizes.width, dtype=sizes.dtype, device=kind, requires_grad=True)
        gain = torch.ones(sizes.width, dtype=sizes.dtype, device=kind, requires_grad=True)

        def gate(x: Tensor = x, gain: Tensor = gain) -> None:
            normed = F.rms_norm(x, gain.shape, gain)
            torch.autograd.grad(x + F.silu(normed) * normed, (x, gain), x)

        found.append((_seconds(gate, kind), moved_by(gate)))
    (few_s, few), (many_s, many) = found
    latency = few_s / few.eager_kernels if kind == "cpu" else 0.0
    return latency, many.eager / max(many_s - many.eager_kernels * latency, many_s / 2)


def _formats(sizes: Sizes, kind: str, memory: float) -> float:
    """Returns seconds that an element takes which is encoded, or decoded, beside its bytes through memory."""
    format = formats.Scaled()
    values = torch.ones(sizes.moved * sizes.width, device=kind)
    encoded = torch.empty(format.nbytes(values.numel()), dtype=torch.uint8, device=kind)

    def both() -> None:
        formats.encode(format, values, encoded)
        formats.decode(format, encoded, values)

    through = 2 * (values.nbytes + encoded.nbytes) / memory
    return max(0.0, _seconds(both, kind) - through) / (2 * values.numel())


def _links(
    world: int, node: int, alone: float, products: Callable[[], object], sizes: Sizes, kind: str
) -> tuple[Link | None, Link | None, tuple[float, float]]:
    """Measures links inside a node, links between nodes if there are several, and contention by the slowest of them."""
    if world == 1:
        return None, None, (0.0, 0.0)
    everyone = default_group()
    inside = between = None
    if world <= node:
        link = inside = _link(everyone, sizes, kind)
    else:
        if node > 1:
            # every rank makes the groups of all nodes
            nodes = range(0, world, node)
            timeout = timeout_of(everyone, torch.device(kind))
            groups = [new_group(list(range(first, first + node)), timeout, None, "of a node") for first in nodes]
            mine = groups[dist.get_rank() // node]
            inside = _link(mine, sizes, kind)
            dist.destroy_process_group(mine)
        link = between = _link(everyone, sizes, kind)
    return inside, between, _contention(everyone, link, alone, products, sizes, kind)


def _both(group: ProcessGroup, nbytes: int, kind: str) -> Callable[[], None]:
    """A gather and a reduction of so many bytes."""
    ranks = group.size()
    of = group_of(group)
    size = max(1, nbytes // ranks // 4)
    full = torch.empty(ranks * size, device=kind)
    shard = torch.ones(size, device=kind)

    def work() -> None:
        of.all_gathers([full], [shard])
        of.reduce_scatters([shard], [full])

    return work


def _link(group: ProcessGroup, sizes: Sizes, kind: str) -> Link:
    short = _seconds(_both(group, sizes.small, kind), kind, group) / 2
    long = _seconds(_both(group, sizes.large, kind), kind, group) / 2
    per_byte = max(long - short, 0.01 * long) / (sizes.large - sizes.small)  # noise must not make it zero or negative
    return Link(max(0.0, short - per_byte * sizes.small), (group.size() - 1) / group.size() / per_byte)


def _contention(
    group: ProcessGroup, link: Link, alone: float, products: Callable[[], object], sizes: Sizes, kind: str
) -> tuple[float, float]:
    """Returns how much longer products take beside gathers and reductions, relative to their time, and these beside
    products, which is measured on the CPU alone."""
    rank = dist.get_rank()
    one = 2 * (link.seconds + sizes.large * (group.size() - 1) / group.size() / link.bandwidth)
    times = _agreed(max(WINDOW, 2 * TIMES * alone) / one, group)
    work = partial(_repeated, _both(group, sizes.large, kind), times)
    began = time.perf_counter()
    if kind == "cuda":
        event = CudaEvent()
        stream = CudaStream(torch.device(kind), rank)
        stream.submit(work, (), event, "calibrate")
        together = _elapsed(partial(_repeated, products, TIMES), kind) / TIMES
        event.wait()
        stream.drain()
        return max(0.0, together / alone - 1.0), 0.0
    ended = HostEvent()
    host = HostStream("calibrate", rank)
    host.submit(work, (), ended, "calibrate")
    count = 0
    while not ended.over and ended.error is None:
        products()
        count += 1
    lasted = time.perf_counter() - began
    ended.wait()
    host.close()
    return max(0.0, lasted / count / alone - 1.0), max(0.0, lasted / times / one - 1.0)


def _repeated(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _agreed(times: float, group: ProcessGroup | None) -> int:
    """Returns a number of repetitions, the same on every rank."""
    every = [times] * (1 if group is None else group.size())
    if group is not None:
        dist.all_gather_object(every, times, group)
    return min(REPEATS, max(1, math.ceil(max(every))))


def _seconds(work: Callable[[], object], kind: str, group: ProcessGroup | None = None) -> float:
    """Returns seconds of `work`, while all ranks do it. group: of ranks that can only do it together"""
    work()
    everyone = group or (default_group() if dist.is_initialized() else None)
    times = _agreed(WINDOW / max(_elapsed(work, kind), 1e-9), everyone)
    found = []
    for _ in range(TIMES):
        if everyone is not None:
            dist.barrier(everyone)
        found.append(_elapsed(partial(_repeated, work, times), kind) / times)
    return statistics.median(found)


def _elapsed(work: Callable[[], object], kind: str) -> float:
    """Times `work` in seconds; on CUDA, on the current stream only."""
    if kind != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _memory_bytes(kind: str, local: int) -> int:
    """Returns the bytes that tensors may fill: on the GPU, beside contexts and communicators; else this rank's part of
    the machine."""
    if kind == "cuda":
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local


def _slowest(key: str, values: list[float]) -> float:
    """Returns the worst value to three digits: more are not known, and every rank plans with the same ones."""
    worst = max(values) if key.endswith(("latency", "contention", "format_seconds")) else min(values)
    return float(f"{worst:.3g}") if key != "memory_bytes" else worst
