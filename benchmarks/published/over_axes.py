"""Published runs with tensor, context and pipeline parallelism, predicted: `python -m benchmarks published --axes`.

Nothing is fitted to the rows. Taken, where the sources do not say: PTD-P's stages are not interleaved; torchtitan has
as many microbatches as stages, which is its default, and two segments a stage where they are interleaved; Llama 3 has
one layer in each segment, since its first has the embedding alone and its last the head, and counts FLOPs as the paper
that it cites (PaLM), attention in whole squares. Not modelled: asynchronous tensor parallelism, which hides collectives
behind the products before and after them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import models
from benchmarks.published.errors import spread
from benchmarks.published.runs import Line, Run, lines_of
from benchmarks.published.steps import KINDS, cluster_of, seconds
from models import gpt2
from train.machine import ROOT

TABLE = ROOT / "docs" / "benchmarks" / "published_axes.csv"
GPUS = {
    "A100 80GB": "A100",
    "H100 80GB": "H100",
    "H100 96GB HBM2e": "H100 HBM2e",
    "H100 95GB HBM2e, lower TDP": "H100 HBM2e",
}
"""The sources' words: kinds of `steps.KINDS`."""
GPTS: dict[str, gpt2.Config] = {
    "gpt-175b": gpt2.Config(vocab=51_200, embed=12_288, ffn=49_152, layers=96, heads=96, max_length=2048),
    "gpt-530b": gpt2.Config(vocab=51_200, embed=20_480, ffn=81_920, layers=105, heads=128, max_length=2048),
}


class Row(NamedTuple):
    """A run, and what a GPU did in the unit of its source."""

    run: Run
    measured: float
    unit: str

    @property
    def predicted(self) -> float:
        """The rate of a GPU as the step is simulated, in the same unit."""
        return rate(self.run, self.unit, seconds(self.run, cluster_of(self.run)))


def rows(table: Path = TABLE) -> list[Row]:
    return [_read(line) for _, line in lines_of(table)]


def _read(line: Line) -> Row:
    gpus, tensor, context, stages, segments, seq_len, sequences, microbatches = (
        int(line[name])
        for name in ("gpus", "tensor", "context", "stages", "segments", "seq_len", "sequences", "microbatches")
    )
    of_2021 = line["precision"] == "fp16"  # copies of the state, whole but for tensor; scores of attention are kept
    order = "interleaved" if segments > 1 else "one_f_one_b"
    gpu = GPUS[line["gpu"]]
    run = Run(
        source=line["run"],
        name=line["model"],
        config=GPTS.get(line["model"]) or models.CONFIGS[line["model"]],
        gpu=gpu,
        cluster=KINDS[gpu],
        gpus=gpus,
        framework="zero3",
        replicas=gpus // stages // tensor if of_2021 else 1,
        order=order if stages > 1 else "",
        stages=stages,
        per_stage=segments,
        tensor=tensor,
        context=context,
        recompute=line["recompute"],
        checkpointed=line["run"] == "torchtitan",
        scores=of_2021,
        fp8=line["precision"] == "fp8",
        reduce="bfloat16" if of_2021 else "float32",
        seq_len=seq_len,
        micro_batch=sequences // microbatches,
        accumulation=microbatches,
        note="async TP" if line["async_tensor"] == "yes" else "",
    )
    return Row(run, float(line["measured"]), line["unit"])


def rate(run: Run, unit: str, seconds: float) -> float:
    """Returns what a step of so many seconds comes to in `unit`, of a GPU.

    TFLOP/s: 6 for each element that is multiplied, and attention in whole squares; with recomputation: PTD-P's formula
    """
    config = run.config
    if unit == "tokens/s":
        return run.tokens / seconds
    if unit == "TFLOP/s":
        flops: float = 6 * config.multiplied + 12 * config.layers * config.heads * config.head_dim * run.seq_len
    else:
        layers, width = config.layers, config.embed
        shape = 1 + run.seq_len / (6 * width) + config.vocab / (16 * layers * width)
        flops = 96 * layers * width**2 * shape
    return run.tokens * flops / seconds / 1e12


def show(as_json: bool) -> None:
    """Prints each row with what was measured and what is predicted, and the errors of each source."""
    errors: dict[str, list[float]] = {}
    listed = list[dict[str, Any]]()
    for row in rows():
        run, predicted = row.run, row.predicted
        error = 100 * (predicted / row.measured - 1)
        errors.setdefault(run.source, []).append(error)
        more = {"config": str(run.config), "cluster": run.gpu, "measured": row.measured, "unit": row.unit}
        listed.append({**run._asdict(), **more, "predicted": predicted, "error": error})
        if as_json:
            continue
        line = f"{run.source}, {run!s:<86} {row.measured:6.0f} {predicted:7.1f} {error:+6.1f}%  {row.unit}"
        if run.context > 1:
            other = row._replace(run=run._replace(uneven=True)).predicted
            line += f"; uneven over context: {other:.1f} {100 * (other / row.measured - 1):+.1f}%"
        print(line, flush=True)
    if as_json:
        print(json.dumps(listed, indent=1))
        return
    for source, found in errors.items():
        of = spread(found)
        within = sum(abs(error) <= 10 for error in found)
        words = f"median {of['median']:.1f}%, largest {of['largest']:.1f}%, {within} of {len(found)} within 10%"
        print(f"{source}: {words}")
