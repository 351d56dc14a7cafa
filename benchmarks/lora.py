"""`python -m benchmarks lora` and `optimizers`: training in several ways, in turn, with one schedule.

    full         every weight is trained                             adamw     a fused kernel
    lora         all matrices of the layers are frozen with an       muon      matrices of layers by Muon, iterations in
                 adapter, the rest is frozen: `ya.lora`                        fp32; the rest by AdamW
    lora-bf16    the same, matrices stored and gathered in bf16
    lora-int8    the same, in int8

Step times, memory and messages over those of the first way. Messages are of the program; memory is the largest sum of
live tensors, measured, beside what the planner says. All compute in fp32: bf16 products are slow on a CPU. Muon
orthogonalises each matrix once, whatever the number of ranks: on two, it should add half of what it adds on one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import yafsdp_fn as ya
from benchmarks import harness
from benchmarks.contenders import LEARNING_RATE, Ours, adamw, ours
from benchmarks.options import OfSchedule
from benchmarks.report import Rows, apart, mib, ratios, spread, table
from models.llama import model as llama

FULL, RANK = "full", 16
STORED = {"lora": None, "lora-bf16": torch.bfloat16, "lora-int8": torch.int8}
"""Storage of matrices with an adapter."""
FINETUNED, OPTIMIZED = (FULL, *STORED), ("adamw", "muon")
PLANNED_GOAL = 0.03
"""Goal of the planner's memory, beside what is measured."""
SHARE_GOAL = 0.55
"""Goal of what Muon adds to a step on two ranks, over what it adds on one."""


@dataclasses.dataclass(frozen=True)
class Lora(OfSchedule):
    """Time full fine-tuning and low-rank adapters interleaved, with their memory and messages."""

    ranks: int = 2
    """Rank processes, with gloo."""


@dataclasses.dataclass(frozen=True)
class Optimizers(OfSchedule):
    """Time steps of AdamW and of Muon interleaved, with their memory and messages."""

    ranks: tuple[int, ...] = (1, 2)
    """Rank processes, with gloo: one run for each number."""


def build(name: str, task: harness.Task, device: torch.device) -> Ours:
    """One way; all begin with the same weights, but for int8, whose sizes alone are right."""
    tx, config = adamw(), task.shape.llama()
    tx = ya.optim.muon(LEARNING_RATE, dtype=None, others=tx) if name == "muon" else tx
    params = llama.params(config, pin_norms=name in OPTIMIZED)
    if name in STORED:
        params = ya.lora(params, RANK, dtype=STORED[name])
    return ours(task.schedule, task.shape, params, tx, seed=task.seed, device=device)


def rank(task: harness.Task, device: torch.device) -> dict[str, Any]:
    batches = task.batches(device)

    def planned(contender: Ours) -> dict[str, int]:
        """Bytes that a rank holds at most and that it sends in a step, of a contender that has taken no step."""
        program = contender.train_step.lower(contender.state, batches[0])
        peak = ya.planner.predict_memory(program, device=contender.state.memory.comms.device.type).peak_bytes
        return {"planned_bytes": peak, "wire_bytes": sum(program.wire_bytes().values())}

    return harness.compared(task, build, batches, device, planned)


def ways(options: OfSchedule, ranks: int, names: Sequence[str], console: Console) -> dict[str, Any]:
    """`{name: row}` on so many ranks, over the first. Raises RankFailed."""
    with console.status(f"timing {', '.join(names)} in turn on {ranks} rank(s)"):
        found = harness.run(
            "benchmarks.lora:rank", names, ranks=ranks, shape=options.shape, schedule=options.schedule, **options.turns
        )
    seconds, first = found["seconds"], found["bytes"][names[0]]
    rows = {}
    for name in names:
        own = found["bytes"][name]
        rows[name] = {
            "step_ms": 1e3 * statistics.median(seconds[name]),
            "over_first": ratios(seconds[name], seconds[names[0]]),
            "adds_ms": spread([1e3 * (a - b) for a, b in zip(seconds[name], seconds[names[0]], strict=True)]),
            **own,
            "wire_over_first": own["wire_bytes"] / first["wire_bytes"] if first["wire_bytes"] else None,
            "peak_over_first": own["peak_bytes"] / first["peak_bytes"],
            "planned_over_peak": own["planned_bytes"] / own["peak_bytes"],
        }
    return rows


def of_ways(found: Mapping[str, Mapping[str, Any]]) -> Rows:
    """A row for each way."""
    rows: Rows = {}
    for name, each in found.items():
        over, off, wire = each["over_first"], each["planned_over_peak"] - 1, each["wire_over_first"]
        rows[name] = {
            "step ms": f"{each['step_ms']:.1f}",
            "ratio": f"{over['median']:.3f}",
            "p10 - p90": apart(over),
            "sent MiB": mib(each["wire_bytes"]),
            "ratio ": "" if wire is None else f"{wire:.3f}",
            "memory MiB": mib(each["peak_bytes"]),
            "ratio  ": f"{each['peak_over_first']:.3f}",
            "planned MiB": mib(each["planned_bytes"]),
            "off": f"{off:+.1%}{'' if abs(off) <= PLANNED_GOAL else ' MISSED'}",
        }
    return rows


def measure(options: Lora, console: Console) -> dict[str, Any]:
    """The result of `lora`. Raises RankFailed."""
    return {"rank": RANK, "contenders": ways(options, options.ranks, FINETUNED, console)}


def show(options: Lora, found: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"config {options.config}, {options.ranks} rank(s), {options.schedule}, fp32, adapters of rank "
        f"{found['rank']}; {options.steps} interleaved steps, medians. Memory: the most live tensors of a rank"
    )
    yield table("per step and rank", of_ways(found["contenders"]))


def measure_optimizers(options: Optimizers, console: Console) -> dict[str, Any]:
    """The result of `optimizers`. Raises RankFailed."""
    by_ranks = {ranks: ways(options, ranks, OPTIMIZED, console) for ranks in options.ranks}
    adds = {ranks: rows["muon"]["adds_ms"]["median"] for ranks, rows in by_ranks.items()}
    return {
        "ranks": {str(ranks): rows for ranks, rows in by_ranks.items()},
        "muon_adds_ms": {str(ranks): each for ranks, each in adds.items()},
        "muon_adds_over_one_rank": {str(ranks): each / adds[1] for ranks, each in adds.items()} if 1 in adds else {},
    }


def show_optimizers(options: Optimizers, found: dict[str, Any]) -> Iterator[str | Table]:
    """A table for each number of ranks, and what Muon adds."""
    shape = options.shape
    yield (
        f"config {options.config}, {shape.batch * shape.seq:,} tokens a rank, {options.schedule}, fp32; "
        f"{options.steps} interleaved steps, medians. Memory: the most live tensors of a rank"
    )
    for ranks, rows in found["ranks"].items():
        yield table(f"per step and rank, {ranks} rank(s)", of_ways(rows))
    for ranks, adds in found["muon_adds_ms"].items():
        share = found["muon_adds_over_one_rank"].get(ranks)
        over = "" if share is None else f", {share:.2f} of what it adds on one"
        missed = " MISSED" if ranks == "2" and share is not None and share > SHARE_GOAL else ""
        yield f"Muon adds {adds:.1f} ms on {ranks} rank(s){over}{missed}"
