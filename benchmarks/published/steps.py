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
import torch.nn.functional as F
from torch import Tensor

import models
import yafsdp_fn as ya
from benchmarks.published.runs import UNSTATED, Refused, Run
from models import gpt2
from models.parts import layers
from yafsdp_fn.lab import peers
from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner import CLUSTERS, Cluster, predict_memory, trace
from yafsdp_fn.planner.costs import UPDATE_BYTES, by_ops
from yafsdp_fn.planner.plan import axes as mesh_of
from yafsdp_fn.planner.simulate import run as simulated
from yafsdp_fn.planner.simulate import tasks
from yafsdp_fn.planner.space import Order
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.schedules import Assignment, Norm, Program, Trace, chained_order, remat

# ---- Clusters.

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
A100 = CLUSTERS["a100-80g"].replace(network_bandwidth=170e9)
H100 = CLUSTERS["h100-80g"]
H200 = CLUSTERS["h200-141g"]
HBM2E = H100.memory_bandwidth * 2.4 / 3.35


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
"""Kind of GPU -> nodes of eight: presets, and data sheets. 85% of the 8 x 200 Gbit/s that nodes of A100 have, of 8 x
400 Gbit/s for others; memory in proportion to the data sheets'. A lower limit of power is in no figure."""
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


# ---- Programs.


class _EvenByVisits(Order):
    """Embedding and head count as a layer each: the first and the last stage have one layer less."""

    def assignment(self, trace: Trace) -> Assignment:
        bare = tuple(visit._replace(cost=Cost()) for visit in trace.visits)
        return super().assignment(trace._replace(visits=bare))


def program(run: Run, microbatches: int) -> Program:
    """The framework's program, with so many microbatches."""
    one = _traced(_key(run))
    policies: dict[str, Any] = {} if run.stops_early else {"every 2nd": remat.every(2), "all": "all"}
    again = policies.get(run.recompute, "none")
    if run.order:
        return _across_stages(run, one, microbatches, again)
    mesh = _mesh(run, one)
    if run.framework == "ddp":
        mesh = (("replicate", one.ranks), ("shard", 1))
    whole = one.on(mesh)._replace(order=chained_order(one.visits, microbatches), microbatches=microbatches)
    schedules: dict[str, Callable[[], Any]] = {
        "fsdp1": lambda: peers.fsdp(remat=again, growth=0.0),
        "fsdp2": lambda: peers.fsdp2(remat=again),
        "zero1": lambda: peers.zero(1, remat=again),
        "zero2": lambda: peers.zero(2, remat=again),
        "ddp": lambda: ya.schedules.ddp(remat=again),
    }
    return schedules[run.framework]()(whole)  # type: ignore[no-any-return]


def _across_stages(run: Run, one: Trace, microbatches: int, again: Any) -> Program:
    """A pipeline, whose stages gather weights once and reduce gradients once a step."""
    kind = _EvenByVisits if run.by_layers else Order
    order = kind(run.order, run.stages, run.per_stage, microbatches)
    build: Any = orders.FACTORIES.get(run.order)
    if run.order == "zero_bubble_2p":
        build = functools.partial(orders.staged, functools.partial(orders.zero_bubble_calls, depth=2))
    whole = order.whole(one, (("stage", run.stages), *_mesh(run, one)))
    made: Program = build(ya.schedules.zero1(remat=again, update=run.apart))(whole)
    if not run.apart:
        return made
    return Program(made.trace, *(tuple(op for op in ops if not isinstance(op, Norm)) for ops in made.stages))


def _mesh(run: Run, one: Trace) -> tuple[tuple[str, int], ...]:
    """The mesh of a stage: that of a copy of the state, and the copies around it."""
    return (("replicate", run.replicas), *one.mesh) if run.replicas > 1 else one.mesh


_program = functools.lru_cache(4)(program)


@functools.lru_cache(8)
def _traced(run: Run) -> Trace:
    """One microbatch of a run, on the ranks that share a copy of a stage's state."""
    family = models.of(run.config)
    config = run.config
    if isinstance(config, gpt2.Config):
        config = dataclasses.replace(config, max_length=run.seq_len)
    params: Any = family.params(config)
    if run.trained == "adapters":
        params = ya.lora(params, 16, where=lambda path, param: "attn" in path)
    loss = family.loss(config)
    if run.logits:
        loss = _loss_of_whole_logits(config, getattr(torch, run.logits))
    tokens = torch.empty(run.micro_batch, run.seq_len, dtype=torch.int64, device="meta")
    precision = ya.Precision(param=getattr(torch, run.param), compute=torch.bfloat16, reduce=getattr(torch, run.reduce))
    found = trace(
        loss,
        params,
        {"tokens": tokens, "targets": tokens},
        mesh=mesh_of(run.gpus // run.stages // run.replicas),
        precision=precision,
        tx=ya.optim.adamw(1e-4),
    )
    inside = remat.layer_visits(found)
    visits = tuple(_as_run(run, visit) if visit.id in inside else visit for visit in found.visits)
    found = found._replace(visits=visits, kernels=run.kernels)
    if run.recompute in ("attention", "half"):
        return by_ops(found, "op" if run.recompute == "half" else "selective")
    if run.stops_early:
        return by_ops(found, "checkpoint", 2 if run.recompute == "every 2nd" else 1)
    return found


def _loss_of_whole_logits(config: Any, dtype: torch.dtype) -> Callable[[Any, Any], ya.Mean]:
    """`loss_fn(params, batch)`: the cross entropy of logits [B, S, V] that are kept for the backward, cast to `dtype`,
    as these runs had them. `models` by itself never has them."""
    decoder: Any = gpt2.DECODER if isinstance(config, gpt2.Config) else layers.decoder()
    body, scores = decoder.block(config), decoder.head(config)

    def head(weights: Any, x: Tensor, targets: Tensor) -> ya.Mean:
        found = scores(weights, x).flatten(0, 1).to(dtype)
        return ya.Mean(F.cross_entropy(found, targets.flatten(), reduction="sum").float(), (targets != -100).sum())

    def loss_fn(params: Any, batch: Any) -> ya.Mean:
        x = decoder.embedded(config, params, batch["tokens"], 0, None)
        x, _ = ya.scan(body, x, params.layers)
        found: ya.Mean = ya.apply(head, decoder.head_unit(config, params), x, batch["targets"])
        return found

    return loss_fn


# ---- What a run does in a layer otherwise than the trace has it.

FP8_RATE = 2.0
"""Products of layers in fp8 against bf16, as data sheets have them; the head, attention and all else stay in bf16."""


def _as_run(run: Run, layer: Visit) -> Visit:
    """A layer as `run` has it.

    fp8       products at `FP8_RATE`; casts, through memory
    """
    cost = layer.cost
    config = run.config
    tokens = run.micro_batch * run.seq_len
    if run.scores:
        cost = _with_scores(cost, tokens, run.seq_len, config.heads)
    if run.fp8:
        flops, back, last = (int(n / FP8_RATE) for n in (cost.flops, cost.bwd_flops, cost.last_flops))
        cost = _moving(cost, _cast_bytes(config, tokens))._replace(flops=flops, bwd_flops=back, last_flops=last)
    if run.trained == "adapters":
        cost = _with_adapters(cost, config, tokens)
    return layer._replace(cost=cost)


def _with_scores(cost: Cost, tokens: int, seq_len: int, heads: int) -> Cost:
    """`cost` with attention by products of whole squares, whose scores are kept: as they are, masked and dropped, 5
    bytes each (Korthikanti et al. 2022), and move six times."""
    products = 2 * cost.attention_flops
    scores = tokens * seq_len * heads
    cost = cost._replace(
        flops=cost.flops + products,
        bwd_flops=cost.bwd_flops + 2 * products,
        attention_flops=0,
        bwd_attention_flops=0,
        kept_bytes=cost.kept_bytes + 5 * scores,
        inner_bytes=cost.inner_bytes + 5 * scores,
    )
    return _moving(cost, 30 * scores)


def _moving(cost: Cost, nbytes: int) -> Cost:
    """`cost` with so many bytes more through memory, a third of them in forward."""
    forward = nbytes // 3
    return cost._replace(moved=cost.moved.more(forward), bwd_moved=cost.bwd_moved.more(nbytes - forward))


def _cast_bytes(config: Any, tokens: int) -> int:
    """Bytes that casts of a layer move, in forward and backward: each factor is read for its scale and to be cast, and
    written in the layouts that products take. Inputs 11, weights 10, gradients of outputs 7 bytes an element."""
    E, Q, KV, F_ = config.embed, config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn
    inputs = 5 * E + Q + F_
    outputs = Q + 2 * KV + 2 * F_ + 2 * E
    nbytes: int = tokens * (11 * inputs + 7 * outputs) + 10 * (E * (2 * Q + 2 * KV) + 3 * E * F_)
    return nbytes


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


# ---- Predictions.


def seconds(run: Run, cluster: Cluster) -> float:
    """Seconds of a step, and of what AdamW takes longer than in one kernel."""
    return _program_s(run, cluster) + _foreach_s(run, cluster) * run.foreach


def _foreach_s(run: Run, cluster: Cluster) -> float:
    """Seconds in which torch's foreach moves more than one kernel does: master and moments in fp32, or in bf16."""
    width = 1.0 if run.param == "float32" else 0.5
    elements: float = run.config.num_parameters * run.replicas / run.gpus
    return elements * (UPDATE_BYTES["eager"] * width - UPDATE_BYTES["fused"]) / cluster.memory_bandwidth


def _program_s(run: Run, cluster: Cluster) -> float:
    """Seconds of the program, simulated. Microbatches beyond two, or beyond thrice the stages, take as long as those
    before."""
    few, most = (2 * run.stages, 3 * run.stages) if run.stages > 1 else (1, 2)
    if run.accumulation <= most:
        return _simulated(run, run.accumulation, cluster)
    more, less = (_simulated(run, n, cluster) for n in (most, few))
    return more + (run.accumulation - most) * (more - less) / (most - few)


def _simulated(run: Run, microbatches: int, cluster: Cluster) -> float:
    """Seconds of a step in so many microbatches; where stages go on apart, of the stage that is at it longest."""
    program = _program(_key(run), microbatches)
    timeline = simulated(program, tasks(program, cluster), cluster)  # no proof: one that goes on apart takes no norm
    if not run.apart:
        return timeline.seconds
    computes = [part.on("compute") for part in timeline.by_stage]
    return max(spans[-1].end - spans[0].start for spans in computes)


def _key(run: Run) -> Run:
    """`run` without what its program does not hang on."""
    bare = run._replace(source="", at="", gpu="", per_node=8, network=None, roce=False)
    return bare._replace(accumulation=1, measured_s=None, measured_bytes=None)


def memory(run: Run) -> int:
    """Bytes of a rank's tensors at their most, of the stage that takes most.

    torch's FSDP has gradients as backward makes them, none yet where the head's are most, and casts its shards for each
    gather; its optimizer has all gradients. A fused loss writes its gradient over the logits in fp32. PEFT with FSDP
    keeps what goes from layer to layer in fp32.
    """
    found = _program(_key(run), min(run.accumulation, 2 * run.stages))
    most = max((predict_memory(part) for part in found.by_stage), key=lambda one: one.peak_bytes)
    peak = most.peak_bytes
    tokens = run.seq_len * run.micro_batch
    if run.logits == "float32" and run.kernels == "fused" and not run.order:
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
    def tokens_per_s(self) -> float:
        """Tokens a second and GPU."""
        return self.run.tokens / self.seconds

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens/s, less one, in percent: above 0 is too fast."""
        return None if self.run.measured_s is None else 100 * (self.run.measured_s / self.seconds - 1)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= cluster_of(self.run).memory_bytes

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
            "tokens_per_s_per_gpu": round(self.tokens_per_s, 1),
            "error": None if self.error is None else round(self.error, 2),
            "predicted_peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def predict(run: Run) -> Predicted:
    """Predicts a run. One whose recomputation is not stated recomputes nothing where that fits, else all. Raises
    Refused where that does not fit either: it did not run so."""
    if run.recompute != UNSTATED:
        return Predicted(run, seconds(run, cluster_of(run)), memory(run))
    card = cluster_of(run).memory_bytes
    for recompute in ("none", "all"):
        one = run._replace(recompute=recompute)
        peak = memory(one)
        if peak <= card:
            return Predicted(one, seconds(one, cluster_of(one)), peak)
    needs = f"{peak / 2**30:,.0f} GiB of {card / 2**30:.0f}"
    raise Refused(f"{run.at}: {run.name}: recomputation is not stated, and with all of it the run needs {needs}")
