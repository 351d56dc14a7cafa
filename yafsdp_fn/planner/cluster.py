"""Hardware as a few numbers, and what a collective costs on it.

A collective over n ranks of a vector of b bytes, k of the ranks in each node, on nodes of K GPUs, as a ring:

    inside a node (n <= k)     (n - 1) node_latency + b (n - 1) / n / node_bandwidth
    over m = n / k nodes       (n - m) node_latency + (m - 1) network_latency + b (n - 1) / n / B
                               B = min(node_bandwidth, network_bandwidth k / K)

An all-reduce is two rings. Where a network is congested (`congestion`), B falls by that part with each node beyond the
second: B / (1 + congestion (m - 2)).

The slowest of m nodes decides: a step takes 1 + jitter E(m) times as long, E(m) the mean of the largest of m normal
deviates, for nodes whose own times differ by `jitter`, relative standard deviation.

A ring over whole nodes enters and leaves each node once, so that B is what the node's network cards carry together;
groups with k < K ranks per node share the cards with the K / k groups beside them, which run the same collective.

A message of b bytes from each rank of a node to one of another stage of a pipeline:

    inside a node              node_latency + b / node_bandwidth
    to another node            network_latency + b / (network_bandwidth / K)
"""

import dataclasses
import difflib
import math
import statistics
from typing import NamedTuple


class Phase(NamedTuple):
    """Part of an op: `seconds` on a resource, alone.

    resource: "compute", slowed by what other streams run; "node" or "network", links that are shared evenly by all
    that use them at a time; "memory", "host" or "latency", not shared
    """

    resource: str
    seconds: float


Phases = tuple[Phase, ...]
"""All of an op, one after the other."""


class CollectiveRanks(NamedTuple):
    """The ranks of a collective. ranks: how many; per_node: how many of them share a node."""

    ranks: int
    per_node: int


COSTS = (
    "node_latency",
    "network_latency",
    "contention",
    "link_contention",
    "step_overhead",
    "unit_overhead",
    "kernel_latency",
    "jitter",
    "congestion",
    "format_seconds",
)
"""Figures of a cluster of which less is better; of the others more is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs. Rates are those that real steps achieve, not those of data sheets.

    matmul_flops, attention_flops: FLOP/s of one GPU in matrix products, and in attention
    memory_bandwidth: bytes/s of one GPU's memory, reads and writes together
    memory_bytes: memory of one GPU for tensors: without the context, communicators and the allocator's waste
    node_bandwidth, network_bandwidth: bus bandwidth in bytes/s, as nccl-tests count it, of a collective inside a node
        and over whole nodes; node_latency, network_latency: seconds per hop of a ring
    host_bandwidth: bytes/s of copies between one GPU and pinned memory of the host, one way at a time
    format_seconds: seconds per element that is encoded into a wire format, or decoded, beside its bytes through memory:
        for the CPU, which computes them by many kernels
    congestion: part of the network's bandwidth that a collective loses with each node beyond the second
    contention: compute takes 1 + contention times as long while another stream runs something
    link_contention: communication takes 1 + link_contention times as long while its rank computes: on the CPU both
        take turns on a core
    kernel_latency: seconds from the end of a kernel to the work of the next one; on the CPU, what calling one takes
    jitter: relative standard deviation of the times of nodes that do the same; the cost of the slowest node grows
        with their number
    step_overhead, unit_overhead: seconds per step, and per step and unit, that no op explains
    host_computes: the thread that issues the ops also computes, as on the CPU: an op begins after the computes that
        were issued before it

    >>> a100 = ya.planner.CLUSTERS["a100-80g"]
    >>> slow = a100.replace(name="slow network", network_bandwidth=a100.network_bandwidth / 10)
    >>> a100.gpus_per_node, slow.name
    (8, 'slow network')
    """

    name: str
    gpus_per_node: int
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    memory_bytes: int
    node_bandwidth: float
    network_bandwidth: float
    node_latency: float
    network_latency: float
    host_bandwidth: float = 25e9
    contention: float = 0.0
    link_contention: float = 0.0
    step_overhead: float = 0.0
    unit_overhead: float = 0.0
    kernel_latency: float = 0.0
    jitter: float = 0.0
    congestion: float = 0.0
    format_seconds: float = 0.0
    host_computes: bool = False

    def __post_init__(self) -> None:
        for figure, value in vars(self).items():
            if figure in ("name", "host_computes"):
                continue
            a_cost = figure in COSTS
            if not isinstance(value, int | float) or not (0 <= value < math.inf if a_cost else value > 0):
                wanted = "a finite number >= 0" if a_cost else "a positive number (math.inf for no limit)"
                raise ValueError(f"Cluster {self.name!r}: {figure}={value!r}, expected {wanted}")
        if not isinstance(self.gpus_per_node, int):
            raise ValueError(f"Cluster {self.name!r}: gpus_per_node={self.gpus_per_node!r}, expected an integer")
        if self.memory_bytes < 1000:
            raise ValueError(
                f"Cluster {self.name!r}: memory={self.memory_bytes}: expected bytes, 62 * 2**30 for 62 GiB"
            )

    def replace(self, **changes: float) -> "Cluster":
        """This cluster with other figures."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def budget(self, memory: int | None) -> int:
        """Returns the bytes of a rank that a step may take: `memory`, where it is given, checked as this cluster's
        own."""
        return self.memory_bytes if memory is None else self.replace(memory_bytes=memory).memory_bytes

    def overhead(self, units: int) -> float:
        """Returns the seconds of a step of so many units that no op explains."""
        return self.step_overhead + self.unit_overhead * units

    def group(self, ranks: int, stride: int = 1) -> CollectiveRanks:
        """Returns the group of `ranks` ranks, every `stride`-th one, from the first rank of a node on."""
        return CollectiveRanks(ranks, max(1, min(ranks, self.gpus_per_node // stride)))

    def ring(self, nbytes: float, group: CollectiveRanks) -> Phases:
        """Returns an all-gather or reduce-scatter of a vector of `nbytes`; an all-reduce is two of them."""
        n, k = group
        nodes = math.ceil(n / k)
        sent = nbytes * (n - 1) / n
        if nodes == 1:
            return self._phases((n - 1) * self.node_latency, sent / self.node_bandwidth, "node")
        latency = (n - nodes) * self.node_latency + (nodes - 1) * self.network_latency
        network = self.network_bandwidth / (1 + self.congestion * max(0, nodes - 2))
        bandwidth = min(self.node_bandwidth, network * min(1.0, k / self.gpus_per_node))
        return self._phases(latency, sent / bandwidth, "network")

    def all_reduce(self, nbytes: float, group: CollectiveRanks) -> Phases:
        """Two rings."""
        return self.ring(nbytes, group) * 2

    def straggling(self, ranks: int) -> float:
        """Returns the part by which the slowest node of so many ranks takes longer than one alone: the mean of the
        largest of m normal deviates (Blom 1958), times `jitter`."""
        nodes = math.ceil(ranks / self.gpus_per_node)
        if nodes == 1:
            return 0.0
        return self.jitter * statistics.NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))

    def all_to_all(self, nbytes: float, group: CollectiveRanks) -> Phases:
        """Returns every rank sends an n-th of its `nbytes` to each other one: what leaves a node does so once per
        rank."""
        n, k = group
        inside = self._phases((k - 1) * self.node_latency, nbytes * (k - 1) / n / self.node_bandwidth, "node")
        sent = nbytes * (n - k) / n
        outside = sent * self.gpus_per_node / self.network_bandwidth
        return inside + self._phases((n - k) * self.network_latency, outside, "network")

    def message(self, nbytes: float, link: str) -> Phases:
        """Returns the phases of a message from one rank to one of another stage over `link`, "node" or "network", while
        its neighbours do the same."""
        if link == "node":
            return self._phases(self.node_latency, nbytes / self.node_bandwidth, link)
        return self._phases(self.network_latency, nbytes * self.gpus_per_node / self.network_bandwidth, link)

    def _phases(self, latency: float, seconds: float, link: str) -> Phases:
        both = Phase("latency", latency), Phase(link, seconds)
        return tuple(phase for phase in both if phase.seconds > 0)


def nearest(name: str, known: list[str]) -> str:
    """Returns the sentence that offers what may have been meant."""
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}? " * bool(close) + f"known: {', '.join(known)}"


A100 = Cluster(
    name="a100-80g",
    gpus_per_node=8,
    matmul_flops=238e12,
    attention_flops=175e12,
    memory_bandwidth=1.6e12,
    memory_bytes=62 * 2**30,
    node_bandwidth=230e9,
    network_bandwidth=94.2e9,
    node_latency=3.4e-6,
    network_latency=14e-6,
    host_bandwidth=25e9,
    contention=0.1,
    kernel_latency=3e-6,
    jitter=0.015,
)
"""Products are fitted to the runs of five sources (`benchmarks published --sources`), the network to YaFSDP's, whose
overhead is in `lab.peers.AS_RUN`. memory_bytes is what YaFSDP's numbers of recomputed layers imply; attention is
FlashAttention-2's forward and backward at head dim 128; hops are what NCCL 2.27 expects
(docs/benchmarks/nccl_h100_tuning.csv); jitter is from InternLM's runs on 8 to 1024 GPUs (1.7%) and torchtitan's on 8
and 128 (1.3%); kernel_latency and contention are guesses that the times tell little about; host_bandwidth is what
nvbandwidth shows of one such GPU alone over PCIe 4.0 x16 (forums.developer.nvidia.com, thread 352186; two that share a
switch may get half). See docs/accuracy.md."""

H100 = Cluster(
    name="h100-80g",
    gpus_per_node=8,
    matmul_flops=555e12,
    attention_flops=310e12,
    memory_bandwidth=2.7e12,
    memory_bytes=62 * 2**30,
    node_bandwidth=360e9,
    network_bandwidth=340e9,
    node_latency=3.4e-6,
    network_latency=14e-6,
    host_bandwidth=55e9,
    contention=0.1,
    kernel_latency=3e-6,
    jitter=0.015,
)
"""Products are fitted to the runs of five sources, with those of H200; the rest is not fitted: FlashAttention-2 at head
dim 128 in the paper of FlashAttention-3 (Shah et al. 2024: 319 to 333 TFLOP/s forward, 310 to 318 backward), 80% of the
memory's 3.35 TB/s, rings over NVLink, eight cards of 400 Gbit/s a node at 85%, copies to the host as nvbandwidth's
examples show them over PCIe 5.0 x16; all else as on A100. Measure yours with `ya.planner.calibrate`."""

H200 = dataclasses.replace(H100, name="h200-141g", memory_bandwidth=3.9e12, memory_bytes=109 * 2**30)
"""An H100 with more and faster memory; the same part of it."""

LOCAL = Cluster(
    name="local",
    gpus_per_node=2,
    matmul_flops=105e9,
    attention_flops=85e9,
    memory_bandwidth=20e9,
    memory_bytes=12 * 2**30,
    node_bandwidth=1.5e9,
    network_bandwidth=1.5e9,
    node_latency=0.3e-3,
    network_latency=0.3e-3,
    host_bandwidth=10e9,
    contention=0.66,
    format_seconds=1.7e-9,
    host_computes=True,
)
"""Two gloo ranks in fp32, a thread each, on a shared machine of two AMD EPYC cores: what `ya.planner.calibrate` found
there in a quiet minute; format_seconds by a processor's time in a busy one. It stands for nobody's machine:
`ya.planner.calibrate` measures yours."""

CLUSTERS: dict[str, Cluster] = {preset.name: preset for preset in (A100, H100, H200, LOCAL)}
"""The presets by name."""


def cluster(which: str | Cluster) -> Cluster:
    """Returns a preset by name, or `which` itself. Raises ValueError, with the nearest names, for an unknown one."""
    if isinstance(which, Cluster):
        return which
    if not isinstance(which, str):
        raise TypeError(f"cluster: expected a name or a ya.planner.Cluster, got {which!r}")
    if which not in CLUSTERS:
        raise ValueError(f"unknown cluster {which!r}; {nearest(which, sorted(CLUSTERS))}; or pass a ya.planner.Cluster")
    return CLUSTERS[which]
