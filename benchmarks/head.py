"""`python -m benchmarks head`: the head and the loss, with the logits of all rows at once and in chunks.

    whole       F.cross_entropy(ya.linear(x, weight), targets)
    chunked     ya.linear_cross_entropy(x, weight, targets)

Each is a training step (`ya.train_step`, one rank, fp32, SGD) on a matrix in front of the head, so that rows need a
gradient, too; the steps are timed in turn, in one process. Memory is the largest sum of live tensors of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import yafsdp_fn as ya
from benchmarks.counting import tensor_peak
from benchmarks.harness import Sample, interleave, timed
from benchmarks.options import Options
from benchmarks.report import Rows, apart, check_losses, mib, ratios, reached, table

CPU = torch.device("cpu")
GOAL = 1.03
"""Goal of the chunked step over the whole one."""


@dataclasses.dataclass(frozen=True)
class Head(Options):
    """Time the head and the loss of large vocabularies, chunked and whole, interleaved step by step."""

    vocab: tuple[int, ...] = (256, 32768, 131072)
    """Vocabularies."""
    embed: int = 512
    """Width of a row."""
    rows: int = 512
    """Rows of a step: sequences times positions."""
    steps: int = 5
    """Timed steps of each."""

    def __post_init__(self) -> None:
        if min(*self.vocab, self.embed, self.rows) < 1 or not self.vocab or self.steps < 2:
            raise ValueError("--vocab, --embed, --rows: expected at least 1; --steps: at least 2, for a spread")


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(ya.linear(x, weight), targets, reduction="sum")


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"whole": whole, "chunked": ya.linear_cross_entropy}


def stepper(head: Head, vocab: int, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[int], float]:
    """A training step of the head; every call is one."""
    params = {"front": {"w": ya.Param((head.embed, head.embed))}, "head": {"w": ya.Param((vocab, head.embed))}}
    tx = ya.optim.sgd(1e-6)
    state = ya.init(params, tx, mesh=ya.mesh(device="cpu"), seed=0)

    def loss_fn(params: Any, batch: dict[str, Tensor]) -> ya.Mean:
        x = ya.apply(lambda w, x: ya.linear(x, w["w"]), params["front"], batch["x"])
        total = ya.apply(lambda w, x, t: loss(x, w["w"], t), params["head"], x, batch["targets"])
        return ya.Mean(total, len(batch["targets"]))

    step = ya.train_step(loss_fn, tx, skip_nonfinite=False)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(head.rows, head.embed, generator=generator),
        "targets": torch.randint(vocab, (head.rows,), generator=generator),
    }

    def run(_: int) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return run


def measure(head: Head, console: Console) -> dict[str, Any]:
    """The result. Raises LossesDiffer."""
    torch.set_num_threads(1)
    rows = []
    for vocab in head.vocab:
        with console.status(f"timing a vocabulary of {vocab}"):
            rows.append({"vocab": vocab, **compare(head, vocab)})
    return {"heads": rows}


def compare(head: Head, vocab: int) -> dict[str, Any]:
    """Milliseconds of each, their ratio step by step, and bytes."""
    steps = {name: stepper(head, vocab, loss) for name, loss in HEADS.items()}
    losses: dict[str, float] = {}

    def turn(name: str, round_: int) -> Sample:
        sample, losses[name] = timed(CPU, functools.partial(steps[name], round_))  # noqa: F821 (deleted below)
        return sample

    samples = interleave(tuple(steps), turn, warmup=3, rounds=head.steps)
    seconds = {name: [sample.seconds for sample in found] for name, found in samples.items()}
    check_losses(losses)
    del steps
    peaks = {name: tensor_peak(functools.partial(stepper, head, vocab, loss), CPU, 2) for name, loss in HEADS.items()}
    return {
        "step_ms": {name: 1e3 * statistics.median(each) for name, each in seconds.items()},
        "over_whole": ratios(seconds["chunked"], seconds["whole"]),
        "peak_tensor_bytes": peaks,
    }


def show(head: Head, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each vocabulary."""
    rows: Rows = {}
    for row in found["heads"]:
        ratio, step, peak = row["over_whole"], row["step_ms"], row["peak_tensor_bytes"]
        rows[f"{row['vocab']:,}"] = {
            "whole, ms": f"{step['whole']:.1f}",
            "chunked, ms": f"{step['chunked']:.1f}",
            "chunked / whole": f"{ratio['median']:.3f}",
            "p10 - p90": apart(ratio),
            "goal": reached(ratio["median"], GOAL),
            "whole, MiB": mib(peak["whole"]),
            "chunked, MiB": mib(peak["chunked"]),
        }
    yield (
        f"head and loss: {head.rows} rows of {head.embed}, fp32, one rank and thread, {head.steps} "
        "interleaved steps, medians; MiB: the most live tensors at once"
    )
    yield table("vocabulary", rows)
