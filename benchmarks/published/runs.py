"""Published runs of other people's frameworks, read: a file with the columns of docs/benchmarks/published_runs.csv.

    read(line)           a row -> Run: model, GPUs and network, the framework's schedule, precision; or Refused, and why
    table(file)          the runs of a file, and what is refused

`steps.py` predicts them. What a row ran is in columns of its own (`RAN`), set when the row was copied in. Taken, where
sources do not say: gathers in bf16, and reductions in fp32 but for FSDP1, ZeRO-1 and ZeRO-2, which reduce in bf16; no
recomputation where that fits, else all of it.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import models
from models import gpt2, llama
from train.machine import ROOT
from train.running.flops import PEAK

TABLE = ROOT / "docs" / "benchmarks" / "published_runs.csv"
COLUMNS = ("model", "gpus", "gpu", "parallelism", "seq_len", "microbatch_per_gpu", "precision", "framework")
UNSTATED = "not stated"
RAN = {
    "framework": ("fsdp1", "fsdp2", "zero1", "zero2", "ddp"),
    "recompute": (UNSTATED, "none", "attention", "half", "every 2nd", "all"),
    "kernels": ("pieces", "eager", "fused"),
    "optimizer": ("", "foreach"),
    "trained": ("all", "adapters"),
    "reentrant": ("", "yes"),
    "fused_loss": ("", "yes"),
    "scores": ("", "yes"),
    "post_validation": ("", "yes"),
}
"""Columns of what a row ran, as `Run` has it, and what they may say; the first where they are empty. A framework that
is none of them is not modelled."""

SHAPES: dict[str, Any] = {
    "internlm-7b": dataclasses.replace(models.CONFIGS["llama2-7b"], vocab=103_168),
    "llama3-7b-shape": models.CONFIGS["llama3-8b"],
    "llama3-13b-shape": llama.Config(
        vocab=128_256, embed=5120, ffn=17_920, layers=40, heads=40, kv_heads=8, head_dim=128, max_length=8192
    ),
    "llama2-34b-shape": models.CONFIGS["llama2-34b"],
    "llama3-405b": models.CONFIGS["llama3.1-405b"],
    "qwen3-32b": dataclasses.replace(models.CONFIGS["qwen3-8b"], embed=5120, ffn=25_600, layers=64, heads=64),
}
"""Models of the sources that `models` has not under that name."""


class Refused(ValueError):
    """A row that is not predicted, and why."""


class Run(NamedTuple):
    """A row.

    source: the file that it is from; at: file and line of the table; name, config: the model; gpu: of `steps.KINDS`;
    per_node: GPUs; network: bytes/s of a node, None if it is not said; roce: it is Ethernet
    framework: of `RAN`; replicas: of the state, around shard groups
    order: of a pipeline; per_stage: its segments; by_layers: stages are even by layers, embedding and head counted as a
    layer each, else by cost; apart: they begin the next step without the norm of all (post-validation)
    recompute: "none", "attention", "half" of the products, "every 2nd" layer, "all", or `UNSTATED`; checkpointed: by
    torch's checkpoint that is not reentrant
    kernels: of what is no product, as `ya.planner.plan` takes them; foreach: but AdamW has one for each operation, as
    is torch's default; trained: "all", or "adapters"; scores: attention is products whose scores are kept, as in
    Megatron of 2021 to 2023; logits: the dtype in which they exist as a whole, "" where they never do; param, reduce:
    dtypes of master and reductions
    micro_batch, accumulation: sequences of a rank at a time, and how often; measured_s: seconds of a step, as far as
    they are known; measured_bytes: memory, math.inf where it ran out
    """

    source: str
    name: str
    config: Any
    gpu: str
    gpus: int
    framework: str
    seq_len: int
    micro_batch: int
    accumulation: int
    recompute: str
    reduce: str
    per_node: int = 8
    network: float | None = None
    roce: bool = False
    replicas: int = 1
    order: str = ""
    stages: int = 1
    per_stage: int = 1
    by_layers: bool = False
    apart: bool = False
    checkpointed: bool = False
    kernels: str = "fused"
    foreach: bool = False
    trained: str = "all"
    scores: bool = False
    logits: str = ""
    fp8: bool = False
    param: str = "float32"
    at: str = ""
    measured_s: float | None = None
    measured_bytes: float | None = None

    @property
    def parallelism(self) -> str:
        if self.gpus == 1:
            return "one GPU"
        return (
            f"{self.stages} stages, {self.order}"
            if self.order
            else self.framework + " x replicas" * (self.replicas > 1)
        )

    @property
    def stops_early(self) -> bool:
        """Says whether layers are recomputed up to the last product that is saved, and no further."""
        return self.checkpointed and self.recompute in ("every 2nd", "all")

    @property
    def tokens(self) -> float:
        """Tokens of a step and GPU."""
        return self.seq_len * self.micro_batch * self.accumulation / self.stages

    def __str__(self) -> str:
        words = f"{self.name}, {self.gpus} {self.gpu}, {self.parallelism}"
        batch = f"{self.seq_len} x {self.micro_batch} x {self.accumulation}"
        return ", ".join([words, batch, self.kernels, *["fp8"] * self.fp8])


ORDERS = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved",
    "zb1p": "zero_bubble",
    "zbh1": "zero_bubble",
    "zb2p": "zero_bubble_2p",
    "zbh2": "zero_bubble_2p",
    "zbv": "v_shaped",
    "zbvzerobubble": "v_shaped",
}
"""Orders of pipelines, however hyphens, spaces and capitals are set."""

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
    scheme = line["parallelism"].lower()
    if re.search(r"\b(tp|cp|ep)\s*=?\s*[2-9]|ptd-p|\btp\d", scheme):
        raise Refused("tensor, context or expert parallelism: published_axes.csv has such rows")
    gpus = _number(line, "gpus", "the number of GPUs is not stated")
    micro_batch = _number(line, "microbatch_per_gpu", "the batch is not stated")
    seq_len = _number(line, "seq_len", "the length of sequences is not stated")
    name, config = _model_of(line)
    per_node = _count(line, "gpus_per_node") or 8
    if gpus > per_node and gpus % per_node:
        raise Refused(f"{gpus} GPUs do not fill nodes of {per_node}")
    order, stages = _stages(scheme, line.get("schedule", "").lower())
    ran = {column: _one_of(line, column) for column in RAN}
    accumulation = _count(line, "microbatches")
    if not accumulation:
        accumulation = max(1, _count(line, "global_batch_seqs") // (micro_batch * gpus // stages))
    precision = line["precision"].lower()
    if re.search(r"nvfp4|mxfp", precision):
        raise Refused("mxfp8 and nvfp4 are not modelled")
    run = Run(
        source=line.get("file", at).removesuffix(".csv"),
        at=at,
        name=name,
        config=config,
        gpu=_gpu(line["gpu"]),
        gpus=gpus,
        per_node=per_node,
        network=_network(line.get("inter_node", "")),
        roce="roce" in line.get("inter_node", "").lower(),
        framework=ran["framework"],
        replicas=_count(line, "replicas") or 1,
        order=order,
        stages=stages,
        per_stage={"interleaved": (config.layers + 2) // stages, "v_shaped": 2}.get(order, 1),
        by_layers=True,
        recompute=ran["recompute"],
        kernels=ran["kernels"],
        foreach=ran["optimizer"] == "foreach",
        trained=ran["trained"],
        scores=ran["scores"] == "yes",
        logits="" if ran["fused_loss"] else "float32",
        fp8=bool(re.search(r"fp8|float8|fp4", precision)),
        param="bfloat16" if "pure bf16" in precision else "float32",
        reduce="bfloat16" if ran["framework"] in ("fsdp1", "zero1", "zero2") and stages == 1 else "float32",
        seq_len=seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
        apart=ran["post_validation"] == "yes",
        checkpointed=ran["framework"] in ("fsdp1", "fsdp2") and not order and not ran["reentrant"],
    )
    return run._replace(measured_s=_measured(line, run), **_memory(line))


def _one_of(line: Line, column: str) -> str:
    """Returns what a column of `RAN` says."""
    allowed = RAN[column]
    said = line.get(column, "")
    if column == "framework" and said not in allowed:
        raise Refused(f"its framework is not modelled; the column framework takes {', '.join(allowed)}")
    if said and said not in allowed:
        raise Refused(f"{column} is {said!r}, expected one of {', '.join(filter(None, allowed))}")
    return said or allowed[0]


def _number(line: Line, column: str, why: str) -> int:
    """A whole number, at least 1. why: the error where the column says nothing"""
    found = _count(line, column)
    if not found:
        raise Refused(why)
    return found


def _count(line: Line, column: str) -> int:
    """A whole number, 0 where the column says nothing: `1,024 (8 nodes)` is 1024."""
    found = _value(line, column) or 0.0
    if found != int(found):
        raise Refused(f"{column} is {line[column]!r}, expected a whole number")
    return int(found)


def _value(line: Line, column: str) -> float | None:
    """A number, whatever is in parentheses behind it; None where the column is empty or has a dash."""
    text = _bare(line.get(column) or "").replace(",", "")
    if text.lower() in ("", "-", "none", "n/a", "not stated"):
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e18:
        raise Refused(f"{column} is {line[column]!r}, expected a number")
    return found


def _model_of(line: Line) -> tuple[str, Any]:
    """The name and config of a row's model: one of `models`, with the layers that it names, or GPT's or Llama's shape
    with so many layers, so wide."""
    layers = re.search(r", (\d+) layers", line["model"].lower())
    name = _name(line["model"])
    config = SHAPES.get(name) or models.CONFIGS.get(name)
    depth, width = (_count(line, each) for each in ("layers", "hidden"))
    if config is None and name.startswith("gpt-") and depth and width:
        config = gpt2.Config(
            vocab=51_200, embed=width, ffn=4 * width, layers=depth, heads=width // 128, max_length=131_072, tied=True
        )
        while width % config.heads:
            config = dataclasses.replace(config, heads=config.heads - 1)
    if config is None:
        raise Refused("no such model here")
    return name, dataclasses.replace(config, layers=int(layers[1])) if layers else config


def _name(text: str) -> str:
    """Spells a model's name as `models` does. text: its name on the hub (`meta-llama/Llama-2-7b-hf`), or in words"""
    name = _bare(text.lower()).split(",")[0].rpartition("/")[2]
    name = re.sub(r"[\s_]+", "-", name.strip()).removeprefix("meta-")
    name = re.sub(r"^(llama|qwen)-+(?=\d)", r"\1", name)
    return re.sub(r"(-(hf|instruct|base|chat|it|v\d[\d.]*))+$", "", name)


def _bare(text: str) -> str:
    """`text` without what is in parentheses."""
    return re.sub(r"\s*\([^)]*\)", "", text).strip()


def _stages(scheme: str, schedule: str) -> tuple[str, int]:
    """Order of a pipeline, stages."""
    found = re.search(r"\bpp\s*=?\s*(\d+)", scheme)
    if not found or found[1] == "1":
        return "", 1
    called = re.sub(r"[\s_-]", "", _bare(schedule).split(",")[0])
    order = "interleaved" if "interleaved1f1b" in called or "1f1binterleaved" in called else ORDERS.get(called)
    if order is None:
        raise Refused(f"pipeline schedule {schedule!r} is not modelled")
    return order, int(found[1])


def _gpu(text: str) -> str:
    if "power limited" in text.lower():
        raise Refused("its GPUs are held to a power that is not stated")
    for kind in ("A100", "H100", "H200", "B200", "MI300X", "MI325X"):
        if re.search(rf"(\b|\d ?x ?){kind}\b", text, re.I):  # a GB200 is no B200, and a GH200 no H200
            low = kind == "H100" and re.search(r"hbm2e|95gib", text.lower())
            return "H100 HBM2e" if low else "A100 40GB" if kind == "A100" and re.search(r"\b40 ?G", text) else kind
    raise Refused(f"no figures for a GPU of kind {text!r}")


def _network(text: str) -> float | None:
    """Bytes/s of a node's network cards, from `8 x 200 Gb/s`, `400 Gb/s per GPU`, `3.2 Tb/s per node`."""
    found = re.search(r"(?:(\d+) x )?([\d.]+) ?([GT])b/s( per GPU)?", text)
    if not found:
        return None
    count, rate, unit, each = found.groups()
    return int(count or 1) * float(rate) * (8 if each else 1) * (1e12 if unit == "T" else 1e9) / 8


BYTES = {
    **{letter: 1e3**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
}


def _measured(line: Line, run: Run) -> float | None:
    """Seconds of a step, from the first of the columns that has something."""

    def given(column: str) -> float:
        return _value(line, column) or 0.0

    sequences = run.tokens / run.seq_len
    if given("step_s"):
        return given("step_s")
    if given("tokens_per_s_per_gpu"):
        return run.tokens / given("tokens_per_s_per_gpu")
    if given("samples_per_s_per_gpu"):
        return sequences / given("samples_per_s_per_gpu")
    rate = given("tflops_per_gpu") * 1e12
    if not rate:
        rate = given("mfu") * PEAK.get(run.gpu.split()[0], 0.0)
    return run.tokens * _flops_per_token(run, line.get("notes", "")) / rate if rate else None


def _flops_per_token(run: Run, notes: str) -> float:
    """FLOPs as the source counts them: 6 for each parameter and attention in whole squares (PaLM), in half squares if
    it says causal."""
    config = run.config
    squares = (6 if "causal" in notes else 12) * config.layers * config.attended * run.seq_len
    return float(6 * config.num_parameters + squares)


def _memory(line: Line) -> dict[str, Any]:
    """Bytes, from a number and a unit, which the column behind it has, or the number itself: `71.3 GiB`."""
    text = line.get("memory", "")
    kind = line.get("memory_unit_kind", "")
    if text.upper() == "OOM":
        return {"measured_bytes": math.inf}
    behind = re.fullmatch(r"([\d.,]+)\s*([a-z]+)", _bare(text), re.I)
    size = _value({"memory": behind[1] if behind else text}, "memory")
    if size is None:
        return {}
    unit = re.search(r"\b([KMGT]i?)B\b", behind[2] if behind else kind, re.I)
    if unit is None:
        raise Refused(f"memory is {text!r} of unit {kind!r}, expected one such as GiB or GB")
    return {"measured_bytes": size * BYTES[unit[1].lower()]}


def table(file: Path = TABLE) -> tuple[list[Run], list[str]]:
    """The runs of a file, and what is not predicted, with reasons. Raises ValueError for a file that is no CSV."""
    runs = list[Run]()
    refused = list[str]()
    try:
        for at, line in _lines_of(file):
            try:
                runs.append(read(line, at))
            except Refused as error:
                refused.append(str(error))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    return runs, refused


def _lines_of(file: Path) -> Iterator[tuple[str, Line]]:
    """Yields the rows of a CSV: where each is, and its fields by column."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        for line in reader:
            yield f"{file.name}, line {reader.line_num}", line
