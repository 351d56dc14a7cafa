"""Steps of published runs (`runs.py`), predicted: `python -m benchmarks published --rows FILE`.

cluster_of(run)      nodes of the kind of its GPU (`KINDS`), with its own network
program(run, n)      the framework's program of n microbatches
seconds(run, ...)    of a step; memory(run): bytes of a rank
predict(run)         both
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import models
import yafsdp_fn as ya
from benchmarks.published.foundry import FP8_RATE, mpt_loss
from benchmarks.published.over_axes import A100, H100, HBM2E, cast_bytes, moving, with_scores
from benchmarks.published.runs import UNSTATED, Refused, Run
from models import gpt2
from models.parts import layers
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, Cluster, predict_memory, simulate, trace
from yafsdp_fn.planner.costs import by_ops
from yafsdp_fn.planner.space import Order
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.schedules import Assignment, Norm, Program, Trace, chained_order, pipelines, remat

CARD = {
    "A100": 79.1,
    "A100 40GB": 39.4,
    "H100": 79.1,
    "H100 HBM2e": 94.5,
    "H200": 139.8,
    "B200": 178.3,
    "MI325X": 255.0,
    "MI300X": 191.0,
}
"""GiB that a process may take of a card."""
H200 = CLUSTERS["h200-141g"]


def _by_data_sheet(flops: float, memory: float, node: float) -> Cluster:
    """A GPU that no figure was fitted to: half of its products, a third in attention, 80% of its memory."""
    return H200.replace(
        matmul_flops=flops / 2, attention_flops=flops / 3, memory_bandwidth=0.8 * memory, node_bandwidth=node
    )


KINDS: dict[str, Cluster] = {
    "A100": A100,
    "A100 40GB": A100.replace(memory_bandwidth=A100.memory_bandwidth * 1.55 / 2.04),
    "H100": H100,
    "H100 HBM2e": H100.replace(memory_bandwidth=HBM2E),
    "H200": H200,
    "B200": _by_data_sheet(2250e12, 8e12, 700e9),
    "MI300X": _by_data_sheet(1307e12, 5.3e12, 300e9),
    "MI325X": _by_data_sheet(1307e12, 6e12, 300e9),
}
"""Kind of GPU -> nodes of eight: the presets, and data sheets."""
ACHIEVED = 0.85
"""Part of the stated bandwidth of network cards that rings reach."""
CONGESTION = 0.005
"""Congestion of Ethernet (`Cluster.congestion`), fitted to InternLM's six rows of few sequences a rank on 512 and 1024
GPUs. InfiniBand's rows on 464 to 1536 GPUs show none."""


def cluster_of(run: Run) -> Cluster:
    """The kind's figures, with the row's own network and card."""
    kind = KINDS[run.gpu]
    network = kind.network_bandwidth * run.per_node / 8 if run.network is None else ACHIEVED * run.network
    return kind.replace(
        gpus_per_node=run.per_node,
        network_bandwidth=network,
        memory_bytes=int(CARD[run.gpu] * 2**30),
        congestion=CONGESTION * run.roce,
    )


class _EvenByVisits(Order):
    """Embedding and head count as a layer each: the first and the last stage have one layer less."""

    def assignment(self, trace: Trace) -> Assignment:
        bare = tuple(visit._replace(cost=Cost()) for visit in trace.visits)
        return super().assignment(trace._replace(visits=bare))


def program(run: Run, microbatches: int) -> Program:
    """The peer's program, with so many microbatches."""
    one = _traced(_key(run))
    policies: dict[str, Any] = {} if run.stops_early else {"every 2nd": remat.every(2), "all": "all"}
    again = policies.get(run.recompute, "none")
    shard = run.gpus // run.stages // run.replicas
    outer = (("replicate", run.replicas),) if run.replicas > 1 else ()
    mesh = (*outer, ("shard", shard))
    if run.order:
        per_stage = {"interleaved": (run.config.layers + 2) // run.stages, "v_shaped": 2}.get(run.order, 1)
        order = _EvenByVisits(run.order, run.stages, per_stage, microbatches)
        build: Any = pipelines.FACTORIES.get(run.order)
        if run.order == "zero_bubble_2p":
            build = functools.partial(pipelines.staged, functools.partial(pipelines.zero_bubble_calls, depth=2))
        whole = order.whole(one, (("stage", run.stages), *mesh))
        made: Program = build(ya.schedules.zero1(remat=again, update=run.apart))(whole)
        if not run.apart:
            return made
        return Program(made.trace, *(tuple(op for op in ops if not isinstance(op, Norm)) for ops in made.stages))
    if run.framework == "ddp":
        mesh = (("replicate", shard), ("shard", 1))
    whole = one.on(mesh)._replace(order=chained_order(one.visits, microbatches), microbatches=microbatches)
    schedules: dict[str, Callable[[], Any]] = {
        "fsdp1": lambda: peers.fsdp(remat=again, growth=0.0),
        "fsdp2": lambda: peers.fsdp2(remat=again),
        "zero1": lambda: peers.zero(1, remat=again),
        "zero2": lambda: peers.zero(2, remat=again),
        "ddp": lambda: ya.schedules.ddp(remat=again),
    }
    return schedules[run.framework]()(whole)  # type: ignore[no-any-return]


_program = functools.lru_cache(4)(program)


@functools.lru_cache(8)
def _traced(run: Run) -> Trace:
    """One microbatch of a run."""
    family, config = models.of(run.config), run.config
    if isinstance(config, gpt2.Config):
        config = dataclasses.replace(config, max_length=run.seq_len)
    params: Any = family.params(config)
    if run.trained == "adapters":
        params = ya.lora(params, 16, where=lambda path, param: "attn" in path)
    tokens = torch.empty(run.micro_batch, run.seq_len, dtype=torch.int64, device="meta")
    loss = (
        mpt_loss(config, gpt2.DECODER if isinstance(config, gpt2.Config) else layers.decoder(), torch.float32)
        if run.logits
        else family.loss(config)
    )
    found = trace(
        loss,
        params,
        {"tokens": tokens, "targets": tokens},
        ranks=max(1, run.gpus // run.stages // run.replicas),
        precision=ya.Precision(
            param=getattr(torch, run.param), compute=torch.bfloat16, reduce=getattr(torch, run.reduce)
        ),
        tx=ya.optim.adamw(1e-4),
    )
    inside = remat.layer_visits(found)
    visits = []
    for visit in found.visits:
        cost = visit.cost
        if visit.id in inside and run.scores:
            cost = with_scores(cost, run.micro_batch * run.seq_len, run.seq_len, config.heads)
        if visit.id in inside and run.fp8:
            flops, back, last = (int(n / FP8_RATE) for n in (cost.flops, cost.bwd_flops, cost.last_flops))
            moved = cast_bytes(config, run.micro_batch * run.seq_len)
            cost = moving(cost, moved)._replace(flops=flops, bwd_flops=back, last_flops=last)
        if visit.id in inside and run.trained == "adapters":
            cost = _with_adapters(cost, config, run.micro_batch * run.seq_len)
        visits.append(visit._replace(cost=cost))
    found = found._replace(visits=tuple(visits), kernels=run.kernels)
    if run.recompute in ("attention", "half"):
        return by_ops(found, "op" if run.recompute == "half" else "selective")
    if run.stops_early:
        return by_ops(found, "checkpoint", 2 if run.recompute == "every 2nd" else 1)
    return found


def _with_adapters(cost: Cost, config: Any, tokens: int) -> Cost:
    """`cost` with what PEFT's adapters of attention's four products do beside them, operation by operation, in fp32
    under autocast: inputs cast to fp32 and back, results scaled and added; and fp32 inputs are kept."""
    inputs = 4 * config.embed
    outputs = (config.heads + 2 * config.kv_heads) * config.head_dim + config.embed
    forward, backward = (tokens * (a * inputs + b * outputs) for a, b in ((14, 12), (20, 10)))
    return cost._replace(
        moved=cost.moved.more(forward),
        bwd_moved=cost.bwd_moved.more(backward),
        inner_bytes=cost.inner_bytes + 4 * tokens * inputs,
        bwd_peak_bytes=cost.bwd_peak_bytes + 4 * tokens * inputs,
    )


def seconds(run: Run, cluster: Cluster) -> float:
    """Seconds of a step, simulated. Microbatches beyond thrice the stages, or beyond two, take as long as others."""
    most = 3 * run.stages if run.stages > 1 else 2
    if run.accumulation <= most:
        return _simulated(run, run.accumulation, cluster)
    few = 2 * run.stages if run.stages > 1 else 1
    more, less = (_simulated(run, n, cluster) for n in (most, few))
    return more + (run.accumulation - most) * (more - less) / (most - few)


def _simulated(run: Run, microbatches: int, cluster: Cluster) -> float:
    """Seconds of a step in so many microbatches; where stages go on apart, of the stage that is at it longest."""
    timeline = simulate(_program(_key(run), microbatches), cluster)
    if not run.apart:
        return timeline.seconds
    computes = [part.on("compute") for part in timeline.parts]
    return max(spans[-1].end - spans[0].start for spans in computes)


def _key(run: Run) -> Run:
    return run._replace(
        measured_s=None,
        measured_bytes=None,
        source="",
        at="",
        network=None,
        roce=False,
        gpu="",
        per_node=8,
        accumulation=1,
    )


def memory(run: Run) -> int:
    """Bytes of a rank's tensors at their most, of the stage that takes most.

    torch's FSDP has gradients as backward makes them, none yet where the head's are most, and casts its shards for each
    gather; its optimizer has all gradients. A fused loss writes its gradient over the logits in fp32. PEFT with FSDP
    keeps what goes from layer to layer in fp32.
    """
    found = _program(_key(run), min(run.accumulation, 2 * run.stages))
    most = max((predict_memory(part) for part in found.parts), key=lambda one: one.peak_bytes)
    peak, tokens = most.peak_bytes, run.seq_len * run.micro_batch
    if run.logits and run.kernels == "fused" and not run.order:
        peak -= 4 * tokens * run.config.vocab
    if run.framework not in ("fsdp1", "fsdp2"):
        return peak
    if run.trained == "adapters" and run.gpus > 1:
        peak += 2 * tokens * run.config.embed * run.config.layers
    update = most.master + most.optimizer + most.grad_shards
    return max(update, peak - most.working_copy - most.grad_shards * (run.accumulation == 1))


class Predicted(NamedTuple):
    """A run, and the seconds of its step and the bytes of a rank that are predicted."""

    run: Run
    seconds: float
    peak_bytes: int

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens/s, less one, in percent: above 0 is too fast."""
        return None if self.run.measured_s is None else 100 * (self.run.measured_s / self.seconds - 1)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= CARD[self.run.gpu] * 2**30

    def as_json(self) -> dict[str, Any]:
        run = self.run
        ran_out = run.measured_bytes == math.inf
        return {
            **run._asdict(),
            "file": run.source,
            "config": str(run.config),
            "measured_bytes": None if ran_out else run.measured_bytes,
            "ran_out": ran_out,
            "seconds": self.seconds,
            "error": None if self.error is None else round(self.error, 2),
            "predicted_peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def predict(run: Run) -> Predicted:
    """Predicts a run. One whose recomputation is not stated recomputes nothing where that fits, else all. Raises
    Refused where that does not fit either: it did not run so."""
    if run.recompute == UNSTATED:
        return _fitting(run)
    return Predicted(run, seconds(run, cluster_of(run)), memory(run))


def _fitting(run: Run) -> Predicted:
    for recompute in ("none", "all"):
        one = run._replace(recompute=recompute)
        peak = memory(one)
        if peak <= CARD[run.gpu] * 2**30:
            return Predicted(one, seconds(one, cluster_of(one)), peak)
    needs = f"{peak / 2**30:,.0f} GiB of {CARD[run.gpu]:.0f}"
    raise Refused(f"{run.at}: {run.name}: recomputation is not stated, and with all of it the run needs {needs}")
