"""Published runs of other people's frameworks, predicted: `python -m train published --rows FILE` of a file with the
columns of docs/benchmarks/published_runs.csv.

    read(line)       a row -> Run: model, GPUs and network, the framework's schedule, precision; or Refused, and why
    program(run)     the peer's program of it
    predict(run)     seconds of a step, and memory of a rank, on `KINDS[run.gpu]`
    table(file)      the runs of a file, and what is refused

Taken, where sources do not say: HSDP over nodes below 20B and FSDP above, where a source has both; torchtitan's
recomputation of its default, half of the products; gathers in bf16, and reductions in fp32 but for FSDP1, DeepSpeed and
InternLM, which reduce in bf16.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import models
import yafsdp_fn as ya
from models import gpt2, llama
from models.parts import layers
from train.machine import ROOT
from train.published.foundry import FP8_RATE, mpt_loss
from train.published.over_axes import A100, H100, HBM2E, cast_bytes, moving, with_scores
from yafsdp_fn.lab import peers
from yafsdp_fn.planner import CLUSTERS, Cluster, Memory, predict_memory, simulate, trace
from yafsdp_fn.planner.costs import by_ops
from yafsdp_fn.planner.space import Order
from yafsdp_fn.program.trace import Cost
from yafsdp_fn.schedules import Assignment, Program, Trace, chained_order, pipelines, remat

TABLE = ROOT / "docs" / "benchmarks" / "published_runs.csv"
COLUMNS = ("model", "gpus", "gpu", "parallelism", "seq_len", "microbatch_per_gpu", "precision")

SHAPES: dict[str, Any] = {
    "internlm-7b": dataclasses.replace(models.CONFIGS["llama2-7b"], vocab=103_168),
    "llama3-7b-shape": models.CONFIGS["llama3-8b"],
    "llama3-13b-shape": llama.Config(
        vocab=128_256, embed=5120, ffn=17_920, layers=40, heads=40, kv_heads=8, head_dim=128, max_length=8192
    ),
    "llama2-34b-shape": models.CONFIGS["llama2-34b"],
    "llama3-405b": models.CONFIGS["llama3.1-405b"],
    "meta-llama/meta-llama3-8b": models.CONFIGS["llama3-8b"],
    "nousresearch/llama2-70b-hf": models.CONFIGS["llama2-70b"],
    "qwen3-32b": dataclasses.replace(models.CONFIGS["qwen3-8b"], embed=5120, ffn=25_600, layers=64, heads=64),
}
"""Models of the sources that `models` has not under that name."""


class Refused(ValueError):
    """A row that is not predicted, and why."""


class Run(NamedTuple):
    """A row. source: its file and line; name, config: the model; gpu: of `KINDS`; network: bytes/s of a node, None if
    it is not said; framework: "fsdp1", "fsdp2", "zero1" to "zero3", or "ddp"; replicas: of the state, around shard
    groups; order: of a pipeline
    recompute: "none", "half" of the products, "every 2nd" layer, or "all"; reentrant: and its layers run to their end;
    kernels: of what is no product, "eager" or "fused"; trained: "all", or "adapters"; scores: attention is products
    whose scores are kept, as in Megatron of 2021 to 2023; logits: they exist as a whole, in fp32; param, reduce: dtypes
    of master and reductions
    micro_batch, accumulation: sequences of a rank at a time, and how often; measured_s: seconds of a step, as far as
    they are known; measured_bytes: memory, math.inf where it ran out
    """

    source: str
    name: str
    config: Any
    gpu: str
    gpus: int
    network: float | None
    framework: str
    replicas: int
    order: str
    stages: int
    recompute: str
    kernels: str
    trained: str
    scores: bool
    logits: bool
    fp8: bool
    param: str
    reduce: str
    seq_len: int
    micro_batch: int
    accumulation: int
    reentrant: bool = False
    measured_s: float | None = None
    measured_bytes: float | None = None

    @property
    def parallelism(self) -> str:
        words = {"": f"{self.framework}{' x replicas' * (self.replicas > 1)}"}
        return words.get(self.order, f"{self.stages} stages, {self.order}") if self.gpus > 1 else "one GPU"

    @property
    def stops_early(self) -> bool:
        """Says whether torch's checkpoint recomputes layers, which stops at the last that is saved: reentrant ones,
        of Megatron, DeepSpeed, InternLM and transformers, do not."""
        return (
            self.framework in ("fsdp1", "fsdp2")
            and self.recompute in ("every 2nd", "all")
            and not self.order
            and not self.reentrant
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step and GPU."""
        return self.seq_len * self.micro_batch * self.accumulation // self.stages

    def __str__(self) -> str:
        words = f"{self.name}, {self.gpus} {self.gpu}, {self.parallelism}"
        return (
            f"{words}, {self.seq_len} x {self.micro_batch} x {self.accumulation}, {self.kernels}" + ", fp8" * self.fp8
        )


# ---- Reads a row. Each function takes its fields, as text, and raises Refused for what is not modelled.

Line = Mapping[str, str]


def read(line: Line, at: str) -> Run:
    """The run of a row. at: where it is, for errors. Raises Refused."""
    missing = [column for column in COLUMNS if column not in line]
    if missing:
        raise Refused(f"{at}: no column {', '.join(missing)}")
    try:
        return _read({name: (value or "").strip() for name, value in line.items() if isinstance(name, str)}, at)
    except Refused as error:
        raise Refused(f"{at}: {line['model']}, {line['parallelism']}: {error}") from None


def _read(line: Line, at: str) -> Run:
    scheme, words = line["parallelism"].lower(), " ".join(line.values()).lower()
    if re.search(r"\b(tp|cp|ep)\s*=?\s*[2-9]|ptd-p|\btp\d", scheme):
        raise Refused("tensor, context or expert parallelism: published_axes.csv has such rows (--axes)")
    if "optimizer on the cpu" in scheme:
        raise Refused("an optimizer on the CPU is not modelled")
    gpus = _number(line, "gpus", "the number of GPUs is not stated")
    micro_batch = _number(line, "microbatch_per_gpu", "the batch is not stated")
    seq_len = _number(line, "seq_len", "the length of sequences is not stated")
    name, config = model_of(line)
    framework, replicas, order, stages = _scheme(scheme, line.get("schedule", "").lower(), words, config, gpus)
    data = gpus // stages
    accumulation = int(line.get("microbatches") or 0)
    sequences = int(line.get("global_batch_seqs") or 0)
    if not accumulation:
        accumulation = max(1, sequences // (micro_batch * data))
    precision = line["precision"].lower()
    fused = line.get("compile") == "yes" or re.search(
        r"liger|fast-kernels|megatron|internevo|simumax|zero-bubble|primus", words
    )
    run = Run(
        source=line.get("file", at).removesuffix(".csv"),
        name=name,
        config=config,
        gpu=_gpu(line["gpu"], words),
        gpus=gpus,
        network=_network(line.get("inter_node", "")),
        framework=framework,
        replicas=replicas,
        order=order,
        stages=stages,
        recompute=_recompute(line.get("ac", "").lower(), config),
        kernels="fused" if fused else "eager",
        trained="adapters" if "lora" in words else "all",
        logits=not re.search(r"liger|fusion", line.get("notes", "").lower()),
        scores="zero-bubble" in words or "ptd-p" in words,
        fp8=bool(re.search(r"fp8|float8|fp4", precision)),
        param="bfloat16" if "pure bf16" in precision else "float32",
        reduce="bfloat16" if framework in ("fsdp1", "zero1", "zero2", "zero3") and stages == 1 else "float32",
        seq_len=seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
        reentrant=bool(re.search(r"fms_acceleration|deepspeed|internevo|megatron", words)),
    )
    if re.search(r"nvfp4|mxfp", precision):
        raise Refused("mxfp8 and nvfp4 are not modelled")
    return run._replace(measured_s=_measured(line, run), **_memory(line))


def _number(line: Line, column: str, why: str) -> int:
    if not line[column].isdecimal() or not int(line[column]):
        raise Refused(why)
    return int(line[column])


def model_of(line: Line) -> tuple[str, Any]:
    """The name and config of a row's model: one of `models`, with the layers that it names, or GPT's or Llama's shape
    with so many layers, so wide."""
    text = line["model"].lower()
    layers = re.search(r", (\d+) layers", text)
    name = (
        re.sub(r"(llama|qwen)[ -]+(\d)", r"\1\2", text.split(",")[0].strip()).replace(" ", "-").replace("qwen-", "qwen")
    )
    config = SHAPES.get(name) or models.CONFIGS.get(name)
    depth, width = (int(line.get(each) or 0) for each in ("layers", "hidden"))
    if config is None and name.startswith("gpt-") and depth and width:
        config = gpt2.Config(
            vocab=51_200, embed=width, ffn=4 * width, layers=depth, heads=width // 128, max_length=131_072, tied=True
        )
        while width % config.heads:
            config = dataclasses.replace(config, heads=config.heads - 1)
    if config is None:
        raise Refused("no such model here")
    return name, dataclasses.replace(config, layers=int(layers[1])) if layers else config


def _scheme(scheme: str, schedule: str, words: str, config: Any, gpus: int) -> tuple[str, int, str, int]:
    """Framework, replicas of the state, order of a pipeline, stages."""
    stages = int(found[1]) if (found := re.search(r"\bpp\s*=?\s*(\d+)", scheme)) else 1
    if stages > 1:
        orders = {"1f1b": "one_f_one_b", "zb-1p": "zero_bubble", "zb-2p": "zero_bubble_2p", "zbv": "v_shaped"}
        order = "interleaved" if "interleaved" in schedule else orders.get(schedule.split(",")[0].strip())
        if order is None:
            raise Refused(f"pipeline schedule {schedule!r} is not modelled")
        return "zero1", 1, order, stages
    replicas = 1
    if ("hsdp" in scheme and ("fsdp/" not in scheme or config.num_parameters < 20e9)) or "inside the node" in scheme:
        replicas = max(1, gpus // 8)
    newer = re.search(r"torchtitan|fsdp2|kempnerforge", words)  # fully_shard
    kinds = {"zero-1": "zero1", "zero-2": "zero2", "grad_op": "zero2", "zero-3": "zero3", "ddp": "ddp"}
    kind = next((kind for name, kind in kinds.items() if name in scheme), None)
    if kind is None and (gpus == 1 or re.search(r"[fh]sdp", scheme)):
        kind = "fsdp2" if newer else "fsdp1"
    if kind is None:
        raise Refused("this parallelism is not known")
    return kind, replicas, "", 1


def _gpu(text: str, words: str) -> str:
    if "power limited" in text.lower():
        raise Refused("its GPUs are held to a power that is not stated")
    for kind in ("A100", "H100", "H200", "B200", "MI300X", "MI325X"):
        if kind.lower() in text.lower():
            low = kind == "H100" and re.search(r"hbm2e|95gib|torchtitan|pytorch/ao", text.lower() + words)
            return "H100 HBM2e" if low else "A100 40GB" if kind == "A100" and "40" in text else kind
    raise Refused(f"no figures for a GPU of kind {text!r}")


def _network(text: str) -> float | None:
    """Bytes/s of a node's network cards, from `8 x 200 Gb/s`, `400 Gb/s per GPU`, `3.2 Tb/s per node`."""
    found = re.search(r"(?:(\d+) x )?([\d.]+) ?([GT])b/s( per GPU)?", text)
    if not found:
        return None
    count, rate, unit, each = found.groups()
    return int(count or 1) * float(rate) * (8 if each else 1) * (1e12 if unit == "T" else 1e9) / 8


def _recompute(text: str, config: Any) -> str:
    if "see tools" in text or text in ("none", "none stated", ""):
        return "none"
    if "op" in text.split(")")[0].replace("per-op", "(op").split("(")[-1] or "not stated" in text:
        return "half"
    if "every" in text:
        return "every 2nd"
    if "earlier post" in text:
        return "none" if config.num_parameters < 10e9 else "every 2nd" if config.num_parameters < 20e9 else "all"
    if text == "full":
        return "all"
    raise Refused(f"recomputation {text!r} is not known")


PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def _measured(line: Line, run: Run) -> float | None:
    """Seconds of a step, from the first of the columns that has something."""

    def given(column: str) -> float:
        try:
            return float(line.get(column) or 0)
        except ValueError:
            raise Refused(f"{column} is {line[column]!r}") from None

    sequences = run.tokens / run.seq_len
    if given("step_s"):
        return given("step_s")
    if given("tokens_per_s_per_gpu"):
        return run.tokens / given("tokens_per_s_per_gpu")
    if given("samples_per_s_per_gpu"):
        return sequences / given("samples_per_s_per_gpu")
    rate = given("tflops_per_gpu") * 1e12
    if not rate and given("mfu") and run.gpu.split()[0] in PEAKS:
        rate = given("mfu") * PEAKS[run.gpu.split()[0]]
    return run.tokens * flops_per_token(run, line.get("notes", "")) / rate if rate else None


def flops_per_token(run: Run, notes: str) -> float:
    """FLOPs as the source counts them: 6 for each parameter and attention in whole squares (PaLM), in half squares if
    it says causal, or the formula of PTD-P with recomputation."""
    config = run.config
    layers, width = config.layers, config.embed
    if "4/3" in notes:
        shape = 1 + run.seq_len / (6 * width) + config.vocab / (16 * layers * width)
        return float(96 * layers * width**2 * shape)
    squares = (6 if "causal" in notes else 12) * layers * config.attended * run.seq_len
    return float(6 * config.num_parameters + squares)


def _memory(line: Line) -> dict[str, Any]:
    text, kind = line.get("memory", ""), line.get("memory_unit_kind", "").lower()
    if text == "OOM":
        return {"measured_bytes": float("inf")}
    if not re.fullmatch(r"[\d.]+", text):
        return {}
    unit = 2**30 if "gib" in kind else 1e9
    return {"measured_bytes": float(text) * unit}


# ---- The clusters, and the program of a run.

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


def cluster_of(run: Run) -> Cluster:
    """The kind's figures, with the row's own network and card. Raises Refused for a kind without figures."""
    if run.gpu not in KINDS:
        raise Refused(f"no figures for {run.gpu}")
    found = KINDS[run.gpu].replace(memory_bytes=int(CARD[run.gpu] * 2**30))
    return found if run.network is None else found.replace(network_bandwidth=ACHIEVED * run.network)


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
        return build(ya.schedules.zero1(remat=again))(whole)  # type: ignore[no-any-return]
    if run.framework == "ddp":
        mesh = (("replicate", shard), ("shard", 1))
    whole = one.on(mesh)._replace(order=chained_order(one.visits, microbatches), microbatches=microbatches)
    schedules: dict[str, Callable[[], Any]] = {
        "fsdp1": lambda: peers.fsdp(remat=again, growth=0.0),
        "fsdp2": lambda: peers.fsdp2(remat=again),
        "zero1": lambda: peers.zero(1, remat=again),
        "zero2": lambda: peers.zero(2, remat=again),
        "zero3": lambda: peers.fsdp(remat=again, growth=0.0),
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
        visits.append(visit._replace(cost=cost))
    found = found._replace(visits=tuple(visits), kernels=run.kernels)
    if run.recompute == "half":
        return by_ops(found, "op")
    if run.stops_early:
        return by_ops(found, "checkpoint", 2 if run.recompute == "every 2nd" else 1)
    return found


def seconds(run: Run, cluster: Cluster) -> float:
    """Seconds of a step. Microbatches beyond twice the stages, or beyond two, take as long as those before."""
    most = 3 * run.stages if run.stages > 1 else 2
    if run.accumulation <= most:
        return simulate(_program(_key(run), run.accumulation), cluster).seconds
    few = 2 * run.stages if run.stages > 1 else 1
    more, less = (simulate(_program(_key(run), n), cluster).seconds for n in (most, few))
    return more + (run.accumulation - most) * (more - less) / (most - few)


def _key(run: Run) -> Run:
    return run._replace(measured_s=None, measured_bytes=None, source="", network=None, gpu="", accumulation=1)


def memory(run: Run) -> Memory:
    """Memory of a rank, of the stage that takes most."""
    found = _program(_key(run), min(run.accumulation, 2 * run.stages))
    return max((predict_memory(part) for part in found.parts), key=lambda one: one.peak_bytes)


class Predicted(NamedTuple):
    """A run, and the seconds of its step and the bytes of a rank that are predicted."""

    run: Run
    seconds: float
    peak_bytes: int

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens/s, less one, in percent: above 0 is too fast."""
        return None if self.run.measured_s is None else 100 * (self.run.measured_s / self.seconds - 1)


def predict(run: Run) -> Predicted:
    return Predicted(run, seconds(run, cluster_of(run)), memory(run).peak_bytes)


def is_table(file: Path) -> bool:
    """Tells whether a file has the columns of published_runs.csv."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return set(COLUMNS) <= set(next(csv.reader(lines), []))


def table(file: Path = TABLE) -> tuple[list[Run], list[str]]:
    """The runs of a file, and what is not predicted, with reasons."""
    runs, refused = list[Run](), list[str]()
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        for line in reader:
            try:
                run = read(line, f"{file.name}, line {reader.line_num}")
                cluster_of(run)
                runs.append(run)
            except Refused as error:
                refused.append(str(error))
    return runs, refused
