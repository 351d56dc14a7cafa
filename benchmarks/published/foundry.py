"""Published runs of LLM Foundry, read: MPT, torch's FSDP1 in micro-batches, on kinds of GPU with fitted figures.

    read(line, at)                a row of its table -> Run; or Refused, and why
    run(model, gpu, gpus, ...)    such a run
    cluster(gpu)                  nodes of a kind of GPU (`KINDS`) with the committed figures

Set, not fitted: links (`KINDS`), and the bytes per element that collectives move (`steps.TRAFFIC`). Gathers and
reductions are in bf16 in all rows, as Composer's "PURE" has them, and as its "DEFAULT" had while these runs were made
(no dtype for reductions, so that torch takes that of the parameters); every micro-batch reduces.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping

from benchmarks.published.runs import Line, Refused, Run, number
from models import gpt2
from train.machine import ROOT
from yafsdp_fn.planner import CLUSTERS, Cluster
from yafsdp_fn.planner.cluster import nearest

TABLE = ROOT / "docs" / "benchmarks" / "llm_foundry_8gpu.csv"
FITTED = TABLE.with_name("llm_foundry_fit.json")
MEASURED = "Throughput (T/s/GPU)"
COLUMNS = (
    "Model",
    "GPU",
    "# GPUs",
    "SeqLen (T)",
    "MicroBatchSize",
    "GradAccum",
    "Activation Checkpointing",
    "Precision",
)

KINDS: dict[str, Cluster] = {
    "a100_40gb": CLUSTERS["a100-80g"].replace(memory_bytes=int(39.4 * 2**30), network_bandwidth=170e9, contention=0.0),
    "a100_80gb": CLUSTERS["a100-80g"].replace(memory_bytes=int(79.1 * 2**30), network_bandwidth=170e9, contention=0.0),
    "h100_80gb": CLUSTERS["h100-80g"].replace(memory_bytes=int(79.1 * 2**30), network_bandwidth=340e9, contention=0.0),
}
"""Kind of GPU -> nodes of eight, before the fit. memory_bytes: all that CUDA has of a card. Links: 85% of the stated
8 x 200 Gbit/s a node for A100; of 8 x 400 Gbit/s for H100, taken and not stated. NVLink, latencies: the presets'.
No contention: `steps.TRAFFIC` counts what it stands for."""

SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Name -> width, layers, heads."""


def mpt_config(model: str, seq_len: int) -> gpt2.Config:
    """The shape of `model`, with as many positions as the sequences have.

    MPT has GPT-2's shape, biases included, with a vocabulary of 50,368; the parameter counts of the published rows are
    this shape's to the last one.
    """
    embed, layers, heads = SIZES[model]
    return gpt2.Config(vocab=50_368, embed=embed, ffn=4 * embed, layers=layers, heads=heads, max_length=seq_len)


@functools.cache
def cluster(gpu: str) -> Cluster:
    """Nodes of a kind of GPU with the figures that `python -m benchmarks published --fit --json` has found."""
    return KINDS[gpu].replace(**json.loads(FITTED.read_text())["figures"][gpu])


def run(
    model: str,
    gpu: str,
    gpus: int,
    seq_len: int,
    micro_batch: int,
    accumulation: int,
    *,
    recompute: bool = False,
    fp8: bool = False,
    kept: bool = False,
) -> Run:
    """A run that nobody has measured."""
    return Run(
        source=TABLE.stem,
        name=model,
        config=mpt_config(model, seq_len),
        gpu=gpu,
        cluster=cluster(gpu),
        gpus=gpus,
        framework="foundry",
        kept=kept,
        recompute="all" if recompute else "none",
        logits="bfloat16",
        fp8=fp8,
        reduce="bfloat16",
        seq_len=seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
    )


KEPT = "SHARD_GRAD_OP"
STRATEGIES = {"FULL_SHARD": False, KEPT: True}
PRECISIONS = {"amp_bf16": False, "bf16": False, "amp_fp8": True}
RECOMPUTED = {"True": True, "False": False}


def read(line: Line, at: str) -> Run:
    """The run of a row. at: where it is, for errors. Raises Refused."""
    missing = [column for column in COLUMNS if column not in line]
    if missing:
        raise Refused(f"{at}: no column {', '.join(map(repr, missing))}")
    if None in line:
        raise Refused(f"{at}: more fields than columns")
    try:
        return _read(line)._replace(at=at)
    except Refused as error:
        raise Refused(f"{at}: {error}") from None


def _read(line: Line) -> Run:
    gpus, seq_len, micro_batch, accumulation = (
        number(line, column, f"{column} is not stated") for column in COLUMNS[2:6]
    )
    model, gpu = _one_of(line, "Model", SIZES), _one_of(line, "GPU", KINDS)
    strategy = line.get("Sharding Strategy") and _one_of(line, "Sharding Strategy", STRATEGIES)
    if line.get("Activation CPUOffload"):
        _one_of(line, "Activation CPUOffload", {"False": True})
    if gpus > 8 and gpus % 8:
        raise Refused(f"{gpus} GPUs do not fill nodes of 8")
    found = run(
        model,
        gpu,
        gpus,
        seq_len,
        micro_batch,
        accumulation,
        recompute=RECOMPUTED[_one_of(line, "Activation Checkpointing", RECOMPUTED)],
        fp8=PRECISIONS[_one_of(line, "Precision", PRECISIONS)],
        kept=strategy == KEPT,
    )
    counted = str(found.config.num_parameters)
    if line.get("NumParams") not in (None, "", counted):
        raise Refused(f"NumParams is {line['NumParams']}, the model built here has {counted}")
    return found._replace(measured_s=_measured(line, found.tokens))


def _measured(line: Line, tokens: float) -> float | None:
    value = line.get(MEASURED)
    if not value:
        return None
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1e12:
        raise Refused(f"{MEASURED} is {value!r}, expected a positive number, or nothing")
    return tokens / rate


def _one_of(line: Line, column: str, known: Mapping[str, object]) -> str:
    value = line[column] or ""
    if value not in known:
        raise Refused(f"{column} is {value!r}; {nearest(value, list(known))}")
    return value
