"""The ground of all sections: models and batches, what fits the device, the emulated network, and turns.

    Setting      Llamas of real widths, cut in depth where a whole one does not fit; on the CPU every width is tiny, so
                 that the same code runs there in seconds, and its times mean nothing
    layers       budget = free memory - RESERVE - SHARE of it all; as many layers as fit it, by the planner's word,
                 before anything is built: contenders of one section get one model, so that no ratio is one of depths
    scaled       the published machine's network, so that communication over compute is here what it is there:
                 f = target * compute here / communication on the preset of the step that runs here;
                 bandwidths / f and latencies * f. Compute here is measured, on a `free` network; the rest is planned
    turns        steps that the host runs ahead of, one contender after the other

A step is one of whole sequences: forward, backward, the gradient's norm and the update by torch's fused AdamW, which
leaves no weight out of its decay; loss and norm stay on the device. Blocks and what is gathered are bf16, master
weights, moments, gradients and reductions fp32. Data loading and clipping are left out.

Blocks that are compiled are planned as they run eagerly: a compiler saves another graph for backward, and nobody knows
which before it runs. What the published runs had per unit that no op explains (`peers.AS_RUN`) is left out on both
sides.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import yafsdp_fn as ya
from benchmarks.contenders import Batch, adamw
from benchmarks.emulated import emulate
from benchmarks.harness import Sample, interleave, timed
from benchmarks.report import spread
from models import llama
from yafsdp_fn.planner import CLUSTERS, Cluster, DoesNotFit, Memory
from yafsdp_fn.planner.simulate import Work, tasks, work
from yafsdp_fn.schedules import Schedule, Trace

A100 = CLUSTERS["a100-80g"]
"""The cluster whose network is emulated."""
TINY: dict[str, Any] = {
    "vocab": 64,
    "embed": 32,
    "ffn": 48,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "max_length": 64,
}
TINY_SEQ = 16
PRECISION = ya.Precision(compute=torch.bfloat16, reduce=torch.float32)
"""Master, moments and reductions in fp32, blocks in bf16."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The device and the sizes of a section.

    small: tiny models on any device, for tests; budget: bytes that a section may fill, None for no limit
    compiled: whether blocks are, but for those of tiny models, where that takes longer than all the rest
    """

    device: str
    small: bool = False
    budget: int | None = None
    compiled: bool = False

    @property
    def tiny(self) -> bool:
        return self.small or self.device == "cpu"

    @property
    def compiles(self) -> bool:
        return self.compiled and not self.tiny

    def config(self, model: str, layers: int | None = None) -> llama.Config:
        """`model` of `llama.CONFIGS` with so many of its layers."""
        config = llama.CONFIGS[model]
        config = dataclasses.replace(config, layers=layers or config.layers)
        return dataclasses.replace(config, **TINY, layers=min(config.layers, 8)) if self.tiny else config

    def seq(self, tokens: int) -> int:
        return TINY_SEQ if self.tiny else tokens

    def batch(self, config: llama.Config, tokens: int, rows: int = 1) -> Batch:
        """`rows` sequences of `tokens` random tokens."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(config.vocab, (rows, self.seq(tokens) + 1), generator=generator).to(self.device)
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()


RESERVE = 2 * 2**30
"""Bytes for what no plan has: CUDA's context, libraries' workspaces, compiled kernels."""
SHARE = 0.05
"""Share of the whole memory, for what the allocator rounds up and cannot join, and for the planner's own error."""


def budget(free: int, total: int) -> int:
    """Bytes that a section may fill of a device with `free` of `total` bytes."""
    return int(free - RESERVE - SHARE * total)


def here() -> int:
    """The budget of the current CUDA device, without what other processes have of it."""
    return budget(*torch.cuda.mem_get_info())


def planned(config: llama.Config, seq: int, schedule: Schedule, *, ranks: int = 1, rows: int = 1) -> Memory:
    """The plan of one rank's step of `sides.build`, of `rows` sequences; nothing is allocated."""
    return ya.planner.predict_memory(schedule(_traced(config, seq, ranks, rows)))


@functools.lru_cache
def _traced(config: llama.Config, seq: int, ranks: int, rows: int = 1) -> Trace:
    """Most plans are schedules of a few traces."""
    tokens = torch.empty((rows, seq), dtype=torch.int64, device="meta")
    return ya.planner.trace(
        llama.loss(config),
        llama.params(config),
        {"tokens": tokens, "targets": tokens},
        ranks=ranks,
        precision=PRECISION,
        tx=adamw(),
        skip_nonfinite=False,
    )


def beside(plan: Memory) -> int:
    """Bytes that a step needs for itself alone."""
    return plan.peak_bytes - plan.held_bytes


def together(states: Iterable[Sequence[Memory]]) -> int:
    """Bytes of states that are there at once and step in turn; each with the plans that share it and its slots."""
    plans = [list(those) for those in states]
    held = sum(max(plan.held_bytes for plan in those) for those in plans)
    return held + max(beside(plan) for those in plans for plan in those)


class Fit(NamedTuple):
    """The layers that fit. layers: that run, of `wanted`; needs, budget: bytes; None: nobody has asked"""

    layers: int
    wanted: int
    needs: int | None = None
    budget: int | None = None

    def words(self) -> dict[str, Any]:
        """The fit in the words of the JSON."""
        return {
            "layers": self.layers,
            "layers asked for": self.wanted,
            "planned_bytes": self.needs,
            "budget_bytes": self.budget,
        }


def layers(wanted: int, needs: Callable[[int], int], budget: int | None) -> Fit:
    """The most layers, at most `wanted`, whose bytes are within `budget`; all of them where there is none.

    Raises DoesNotFit where a single layer is too large.
    """
    if budget is None:
        return Fit(wanted, wanted)
    of = functools.cache(needs)
    fits = bisect.bisect_right(range(1, wanted + 1), budget, key=of)
    if not fits:
        raise DoesNotFit(f"one layer needs {of(1) / 2**30:.1f} GiB, and there are {budget / 2**30:.1f} GiB")
    return Fit(fits, wanted, of(fits), budget)


class Place(NamedTuple):
    """Part of a model on rank 0 of some. layers: at most, None for all; ranks: more than one are emulated"""

    model: str
    layers: int | None
    seq: int
    ranks: int = 1

    def fit(self, setting: Setting, needs: Callable[[llama.Config], int]) -> Fit:
        """The most layers of which a section's `needs` are within the budget."""
        wanted = setting.config(self.model, self.layers).layers
        return layers(wanted, lambda n: needs(setting.config(self.model, n)), setting.budget)

    def planned(self, setting: Setting, config: llama.Config, schedule: Schedule) -> Memory:
        """`planned` there."""
        return planned(config, setting.seq(self.seq), schedule, ranks=self.ranks)

    def there(self) -> contextlib.AbstractContextManager[object]:
        """Inside, this process is rank 0 of the ranks, on a network that takes no time."""
        return contextlib.nullcontext() if self.ranks == 1 else emulate(free(), self.ranks)


class Row(NamedTuple):
    """A published configuration: one sequence of `seq` tokens per GPU; the first `recomputed` layers run again.

    layers: of the whole model; ratio: YaFSDP's published step over FSDP's
    """

    model: str
    gpus: int
    seq: int
    layers: int
    recomputed: int
    ratio: float

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the two models that are timed: as large a part of them is recomputed as of the whole one."""
        return (8, 16) if self.recomputed else (4, 8)

    def at(self, depth: int) -> int:
        """Layers that recompute in a model of `depth` layers."""
        return round(self.recomputed * depth / self.layers)


@functools.cache
def published() -> dict[str, Row]:
    """The rows of docs/benchmarks/published_yafsdp.csv of 2048 tokens, by name."""
    from benchmarks.published.yafsdp import rows

    found = {}
    for row in rows():
        if row.seq_len == 2048 and (row.model, row.gpus) != ("llama2-7b", 128):
            layers = llama.CONFIGS[row.model].layers
            ratio = row.yafsdp_s / row.fsdp_s
            found[f"{row.model}/{row.gpus}"] = Row(row.model, row.gpus, row.seq_len, layers, row.ckpt_layers, ratio)
    return found


def target(row: Row, depth: int) -> float:
    """Communication over compute of so many layers of the real widths, on the preset."""
    real = dataclasses.replace(llama.CONFIGS[row.model], layers=depth)
    there = work_of(row, real, row.seq, A100)
    return there.comm_s / there.compute_s


def work_of(row: Row, config: llama.Config, seq: int, cluster: Cluster) -> Work:
    """Seconds of compute and of communication of `zero3` on the row's ranks, nothing waiting for anything."""
    program = ya.schedules.zero3(remat=ya.schedules.remat.first(row.at(config.layers)))(_traced(config, seq, row.gpus))
    return work(program, tasks(program, cluster), cluster)


def free(cluster: Cluster = A100) -> Cluster:
    """The nodes of `cluster`, on a network that takes no time."""
    return dataclasses.replace(
        cluster,
        name=f"{cluster.name}, free network",
        node_bandwidth=math.inf,
        network_bandwidth=math.inf,
        node_latency=0.0,
        network_latency=0.0,
    )


def scaled(f: float, cluster: Cluster = A100) -> Cluster:
    """Nodes whose collectives take `f` times as long."""
    return dataclasses.replace(
        cluster,
        name=f"{cluster.name}, network x {f:.3g}",
        node_bandwidth=cluster.node_bandwidth / f,
        network_bandwidth=cluster.network_bandwidth / f,
        node_latency=cluster.node_latency * f,
        network_latency=cluster.network_latency * f,
    )


class Line(NamedTuple):
    """Seconds by number of layers, from two depths: what a layer adds, and what is there without layers."""

    per_layer: float
    rest: float

    @classmethod
    def through(cls, depths: tuple[int, int], seconds: tuple[float, float]) -> Line:
        slope = (seconds[1] - seconds[0]) / (depths[1] - depths[0])
        return cls(slope, seconds[0] - slope * depths[0])

    def at(self, layers: int) -> float:
        return self.rest + self.per_layer * layers


EACH = 2


class Contender(Protocol):
    def turn(self) -> None:
        """Prepares its steps: sets what contenders that share memory set differently."""

    def step(self, batch: Batch) -> Tensor:
        """A training step; the loss, on the device."""


def turns(
    contenders: Mapping[str, Contender],
    batch: Batch,
    setting: Setting,
    *,
    rounds: int,
    warmup: int = 3,
    each: int = EACH,
) -> dict[str, list[float]]:
    """Seconds per step of each contender, one sample per round. Raises RuntimeError for a loss that is not finite.

    for round in range(rounds):
        for contender in order(round):                  # `harness.order`
            device idle; contender.turn(); one step     # the host gets ahead, streams are as in a long run
            event; `each` steps; event                  # the sample: the time between the events, over `each`

    Nothing inside waits for the device: a step returns its loss as a tensor, read when all is over. On the CPU one step
    is a sample, and over when its loss is read.
    """
    device, losses = torch.device(setting.device), dict[str, Tensor]()

    def steps(name: str, count: int) -> Tensor:
        for _ in range(count):
            loss = contenders[name].step(batch)
        if device.type == "cpu":
            loss.item()
        return loss

    def turn(name: str, round_: int) -> Sample:
        setting.synchronize()
        contenders[name].turn()
        if device.type == "cpu" or round_ < 0:
            sample, losses[name] = timed(device, lambda: steps(name, 1))
            return sample
        contenders[name].step(batch)
        sample, losses[name] = timed(device, lambda: steps(name, each), ahead=True)
        return sample._replace(seconds=sample.seconds / each)

    samples = interleave(list(contenders), turn, warmup=warmup, rounds=rounds)
    for name, loss in losses.items():
        if not math.isfinite(float(loss)):
            raise RuntimeError(f"{name}: the loss of the last step is {float(loss)}, so its times are not reported")
    return {name: [sample.seconds for sample in found] for name, found in samples.items()}


def shown(samples: Sequence[float]) -> dict[str, Any]:
    """Milliseconds: median, p10, p90 and all."""
    milliseconds = [1e3 * s for s in samples]
    return {**{key: round(value, 4) for key, value in spread(milliseconds).items()}, "all": milliseconds}
