"""`python -m train published --register`: predictions for more nodes than were measured, as a CSV on standard output.

Each run on eight GPUs again on 16 to 512, with the same micro-batch and accumulation; and 70B, which does not fit
eight: recomputed, one micro-batch a step, of the largest power of two of sequences that leaves a tenth of a card free.
"""

from __future__ import annotations

import csv
import sys
from typing import Any

from train.published import mpt
from train.published.foundry import KINDS, MEASURED, Row, peak, rows, tokens_per_s
from train.published.foundry_fit import fitted

GPUS = (16, 32, 64, 128, 256, 512)
PREDICTED = "predicted_tokens_per_s_per_gpu"
LENGTHS_OF_70B = (2048, 8192)


def largest(gpu: str, gpus: int, seq_len: int) -> Row | None:
    """70B's row, None where one sequence is too many."""
    found = None
    for micro_batch in (1, 2, 4, 8, 16, 32):
        row = Row("70b", gpu, gpus, seq_len, micro_batch, 1, recompute=True, fp8=False)
        if peak(row).peak_bytes > 0.9 * KINDS[gpu].memory_bytes:
            return found
        found = row
    return found


def table() -> list[Row]:
    """The rows, of nobody's measurement."""
    seen = dict.fromkeys(row._replace(measured=None) for row in rows())
    again = [row._replace(gpus=gpus) for row in seen for gpus in GPUS]
    more = [largest(gpu, gpus, length) for gpu in KINDS for gpus in GPUS for length in LENGTHS_OF_70B]
    return [*again, *(row for row in more if row is not None)]


def show() -> None:
    """Writes the columns that `--rows` reads, without measured values, and what is predicted."""
    first = ["Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "GlobalBatchSize", MEASURED]
    rest = ["Precision", "Sharding Strategy", "Activation Checkpointing", "NumParams", PREDICTED]
    out = csv.DictWriter(sys.stdout, [*first, *rest], lineterminator="\n")
    out.writeheader()
    for row in table():
        out.writerow(_line(row))


def _line(row: Row) -> dict[str, Any]:
    return {
        "Model": row.model,
        "SeqLen (T)": row.seq_len,
        "# GPUs": row.gpus,
        "GPU": row.gpu,
        "MicroBatchSize": row.micro_batch,
        "GradAccum": row.accumulation,
        "GlobalBatchSize": row.micro_batch * row.accumulation * row.gpus,
        "Precision": "amp_fp8" if row.fp8 else "bf16" if row.gpu == "a100_40gb" else "amp_bf16",
        "Sharding Strategy": "FULL_SHARD",
        "Activation Checkpointing": row.recompute,
        "NumParams": mpt.config(row.model, row.seq_len).num_parameters,
        PREDICTED: f"{tokens_per_s(row, fitted()[row.gpu]):.1f}",
    }
