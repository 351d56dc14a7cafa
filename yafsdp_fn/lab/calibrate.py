"""ya.planner.calibrate: measures this machine by microbenchmarks of a few seconds.

    print(ya.planner.calibrate())        # Cluster(name='here', gpus_per_node=2, ...): a preset to paste

matmul, attention      products and non-causal attention of sizes that fill the device, in the dtype of training
memory                 a copy: bytes read and written
host                   a copy from the GPU to pinned memory; on the CPU, a copy through memory
links                  all-gathers of two sizes: what each further byte takes is the bandwidth, the rest the latency
contention             products beside a running all-gather, over the same products alone
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from yafsdp_fn.dist.cuda_streams import CudaEvent, CudaStream
from yafsdp_fn.dist.groups import group_of
from yafsdp_fn.dist.store import new_group
from yafsdp_fn.dist.streams import HostEvent, HostStream, Stream
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.util.torch_private import default_group, timeout_of

TIMES = 5
"""Measurements of each figure, after a warm-up; the median counts. The same number on every rank."""


class Sizes(NamedTuple):
    """The sizes of the measurements. side: of square matrices; sequence: of attention; copied, small, large: bytes"""

    dtype: torch.dtype
    side: int
    sequence: int
    copied: int
    small: int
    large: int


SIZES = {
    "cpu": Sizes(torch.float32, 512, 512, 1 << 27, 1 << 16, 1 << 24),
    "cuda": Sizes(torch.bfloat16, 8192, 8192, 1 << 29, 1 << 20, 1 << 28),
}
HEADS, HEAD_DIM = 8, 64


class Link(NamedTuple):
    """A measured link. seconds: of an all-gather of nothing; bandwidth: bytes/s of the bus, as nccl-tests count it"""

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
    sizes, world = SIZES[kind], dist.get_world_size() if dist.is_initialized() else 1
    default = torch.cuda.device_count() if kind == "cuda" else world
    node = int(os.environ.get("LOCAL_WORLD_SIZE", default)) if per_node is None else per_node
    if node < 1 or (world > node and world % node):
        raise ValueError(f"calibrate: {world} ranks do not fill nodes of per_node={node}; give a divisor of {world}")
    x = torch.randn(sizes.side, sizes.side, dtype=sizes.dtype, device=kind)
    product = partial(torch.mm, x, x, out=torch.empty_like(x))
    q = torch.randn(1, HEADS, sizes.sequence, HEAD_DIM, dtype=sizes.dtype, device=kind)
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=kind)
    with torch.no_grad():
        one_product = _seconds(product, kind)
        attention = _seconds(partial(torch.nn.functional.scaled_dot_product_attention, q, q, q), kind)
        copy = _seconds(partial(torch.empty_like(source).copy_, source), kind)
        inside, between, contention = _links(world, node, one_product, product, sizes, kind)
        to_host = copy
        if kind == "cuda":
            pinned = torch.empty_like(source, device="cpu", pin_memory=True)
            to_host = _seconds(partial(pinned.copy_, source, non_blocking=True), kind)
    memory = 2 * sizes.copied / copy
    inside = inside or Link(0.0, memory / 2)
    hops, local, nodes = world - 1, min(node, world), max(1, world // node)
    node_latency = inside.seconds / max(1, local - 1)
    network = inside if between is None else between
    # a ring over nodes has hops of both kinds
    outside = (
        node_latency if nodes == 1 else max(0.0, network.seconds - (hops - nodes + 1) * node_latency) / (nodes - 1)
    )
    figures = {
        "matmul_flops": 2 * sizes.side**3 / one_product,
        "attention_flops": 4 * HEADS * HEAD_DIM * sizes.sequence**2 / attention,
        "memory_bandwidth": memory,
        "memory_bytes": _memory_bytes(kind, local),
        "node_bandwidth": inside.bandwidth,
        "network_bandwidth": network.bandwidth,
        "node_latency": node_latency,
        "network_latency": outside,
        "host_bandwidth": sizes.copied / to_host,
        "contention": contention,
    }
    agreed: dict[str, Any] = {key: _slowest(key, value) for key, value in _everywhere(figures, world).items()}
    agreed["memory_bytes"] = int(agreed["memory_bytes"])
    return Cluster(name=name, gpus_per_node=node, host_computes=kind == "cpu", **agreed)


def _links(
    world: int, node: int, alone: float, product: Callable[[], object], sizes: Sizes, kind: str
) -> tuple[Link | None, Link | None, float]:
    """Measures links inside a node, links between nodes if there are several, and contention by the slowest of them."""
    if world == 1:
        return None, None, 0.0
    everyone = default_group()
    inside = between = None
    if world <= node:
        link = inside = _link(everyone, sizes, kind)
    else:
        if node > 1:
            # every rank makes the groups of all nodes
            nodes, timeout = range(0, world, node), timeout_of(everyone, torch.device(kind))
            groups = [new_group(list(range(first, first + node)), timeout, None, "of a node") for first in nodes]
            mine = groups[dist.get_rank() // node]
            inside = _link(mine, sizes, kind)
            dist.destroy_process_group(mine)
        link = between = _link(everyone, sizes, kind)
    return inside, between, _contention(everyone, link, alone, product, sizes, kind)


def _gather(group: ProcessGroup, nbytes: float, kind: str) -> Callable[[], None]:
    ranks = group.size()
    size = max(1, int(nbytes) // ranks // 4)
    full, shard = torch.empty(ranks * size, device=kind), torch.ones(size, device=kind)
    return partial(group_of(group).all_gathers, [full], [shard])


def _link(group: ProcessGroup, sizes: Sizes, kind: str) -> Link:
    short, long = (_seconds(_gather(group, nbytes, kind), kind) for nbytes in (sizes.small, sizes.large))
    per_byte = max(long - short, 0.01 * long) / (sizes.large - sizes.small)  # noise must not make it zero or negative
    return Link(max(0.0, short - per_byte * sizes.small), (group.size() - 1) / group.size() / per_byte)


def _contention(
    group: ProcessGroup, link: Link, alone: float, product: Callable[[], object], sizes: Sizes, kind: str
) -> float:
    """Returns how much longer products take beside an all-gather that outlasts them, relative to their time."""
    every: list[float] = [0.0] * group.size()
    dist.all_gather_object(every, 4 * TIMES * alone * link.bandwidth, group)  # ranks must gather alike
    work = _gather(group, min(4 * sizes.large, max(every)), kind)
    rank = dist.get_rank()
    stream: Stream = CudaStream(torch.device(kind), rank) if kind == "cuda" else HostStream("calibrate", rank)
    event = CudaEvent() if kind == "cuda" else HostEvent()
    stream.submit(work, (), event, "calibrate")

    def products() -> None:
        for _ in range(TIMES):
            product()

    together = _elapsed(products, kind) / TIMES
    event.wait()
    stream.drain()
    if isinstance(stream, HostStream):
        stream.close()
    return max(0.0, together / alone - 1.0)


def _seconds(work: Callable[[], object], kind: str) -> float:
    work()
    return statistics.median(_elapsed(work, kind) for _ in range(TIMES))


def _elapsed(work: Callable[[], object], kind: str) -> float:
    """Times `work` in seconds; on CUDA, on the current stream only."""
    if kind != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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


def _everywhere(figures: dict[str, float], world: int) -> dict[str, list[float]]:
    """Gathers each figure from every rank."""
    every: list[Any] = [figures] * world
    if world > 1:
        dist.all_gather_object(every, figures)
    return {key: [theirs[key] for theirs in every] for key in figures}


def _slowest(key: str, values: list[float]) -> float:
    """Returns the worst value to three digits: more are not known, and every rank plans with the same ones."""
    worst = max(values) if key.endswith("latency") or key == "contention" else min(values)
    return float(f"{worst:.3g}") if key != "memory_bytes" else worst
