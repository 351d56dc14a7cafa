"""`python -m benchmarks`: one training step of our schedules, and of FSDP2, DDP and the plain module.

    all contenders in turn: times
    for contender in contenders: rank processes with this one alone: peak memory, allocations, collectives
    refuse if the losses differ, else report

The goals are those of the CPU: time over `plain` at one rank, all else at two.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import yafsdp_fn as ya
from benchmarks import harness, names
from benchmarks.contenders import Stepper, adamw, all_reducing, build
from benchmarks.counting import count
from benchmarks.options import MALLOC_TUNED, Bench
from benchmarks.report import Rows, apart, check_losses, mib, ratios, reached, spread, table
from benchmarks.shapes import SHAPES, Shape
from models import llama
from train import schedule_names
from yafsdp_fn.planner import Memory
from yafsdp_fn.planner.plan import axes

TIME_GOALS = {
    "A": {"fsdp2": 0.80, "fsdp2-tuned": 0.88, "ddp": 1.03, "plain": 1.01},
    "B": {"fsdp2": 0.35, "fsdp2-tuned": 0.57, "ddp": 1.05, "plain": 0.92},
    "C": {"fsdp2": 0.42, "ddp": 1.10, "plain": 1.03},
}
"""Median of step times, step by step."""


MEMORY_GOALS = {"A": {"fsdp2": 0.85, "ddp": 0.90}, "B": {"fsdp2": 0.90, "ddp": 0.80}}
"""Peak memory of the rank that needs most."""


def goal(table: dict[str, dict[str, float]], bench: Bench, peer: str) -> float | None:
    """The goal over contender `peer` in `table`; None where the run is not one that goals are set for."""
    usual = bench.device == "cpu" and bench.shape == SHAPES[bench.config] and bench.microbatches == 1
    base = peer.removeprefix(names.PEER)
    ranks = 1 if base == "plain" else 2
    if not usual or bench.ranks != ranks:
        return None
    return table.get(bench.config, {}).get(base)


class TooMuch(RuntimeError):
    """Contenders that cannot be timed together on this machine: on the CPU the end would be the kernel's, which kills
    whom it likes."""


PROCESS_BYTES = 500 << 20
"""Python, torch, gloo's buffers."""


def planned(bench: Bench, name: str) -> Memory:
    """The plan of a rank's step of contender `name`; of a peer, that of the schedule that is like it."""
    contender = names.read(name)
    base = contender.base if contender.ours else "zero3" if contender.base == "fsdp2" else "ddp"
    return _planned(
        bench.shape, bench.ranks, bench.microbatches, base, contender.unroll, "nofused" in contender.features
    )


@functools.cache
def _planned(shape: Shape, ranks: int, microbatches: int, base: str, unroll: int, defined: bool) -> Memory:
    parts, chunks = schedule_names.split(base, microbatches)
    replicas = schedule_names.mesh(base, ranks)
    replicas.pop("shard", None)  # what is left
    tokens = torch.empty((shape.batch, shape.seq), dtype=torch.int64, device="meta")
    trace = ya.planner.trace(
        llama.loss(shape.llama(), chunks=chunks, unroll=unroll),
        llama.params(shape.llama()),
        {"tokens": tokens, "targets": tokens},
        mesh=axes(ranks, **replicas),
        tx=adamw(fused=not defined),
        microbatches=parts,
        skip_nonfinite=False,
        device="cpu",
    )
    return ya.planner.predict_memory(schedule_names.make(base, shape.layers)(trace), device="cpu")


def held_bytes(bench: Bench, name: str) -> int:
    """About what contender `name` holds on all ranks together."""
    return bench.ranks * planned(bench, name).held_bytes


def process_bytes(bench: Bench) -> int:
    """About what a rank process holds beside the contenders' states: one of them at a time is in its step."""
    plans = [planned(bench, name) for name in bench.contenders]
    return PROCESS_BYTES + max(plan.peak_bytes - plan.held_bytes for plan in plans)


def available_bytes() -> int | None:
    """Bytes that the kernel can give to new processes; None where it does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def too_much(bench: Bench, available: int | None) -> str | None:
    """Says why the contenders cannot be timed together in `available` bytes, and what each needs; None if they can."""
    if bench.device != "cpu" or available is None:
        return None
    held = {name: held_bytes(bench, name) for name in bench.contenders}
    needed = sum(held.values()) + len({names.read(name).tuned for name in held}) * bench.ranks * process_bytes(bench)
    if needed <= available:
        return None
    each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in held.items())
    return (
        f"all contenders together need about {needed / 2**30:.1f} GiB on {bench.ranks} ranks, and "
        f"{available / 2**30:.1f} GiB are available (in GiB: {each}). Time them in several commands that begin with "
        f"the same --schedules {bench.schedules[0]}: ratios over it compare"
    )


def check(bench: Bench) -> None:
    """Raises TooMuch where the contenders do not fit into what is available now."""
    if sentence := too_much(bench, available_bytes()):
        raise TooMuch(sentence)


def measure(bench: Bench, console: Console) -> dict[str, Any]:
    """The result. Raises RankFailed, LossesDiffer, and TooMuch where the contenders do not fit into memory at once."""
    check(bench)
    with console.status(f"timing {', '.join(bench.contenders)} in turn"):
        timed = harness.run("benchmarks.steps:time", bench.contenders, **bench.turns)
    check_losses(timed["losses"])  # before the counting runs, which take as long again
    counted: dict[str, dict[str, Any]] = {}
    for name in bench.contenders if bench.counts else ():
        with console.status(f"counting memory, allocations and collectives of {name}"):
            counted[name] = harness.run("benchmarks.steps:counts", (name,), **bench.turns)
    return result(bench, timed, counted)


def time(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """Seconds and losses of all contenders, and what they say of their programs."""
    contenders = {name: built(name, task, device) for name in task.contenders}
    found = harness.in_turn(task, contenders, task.batches(device), device)
    return {**found, "programs": {name: each.program() for name, each in contenders.items()}}


def built(name: str, task: harness.Task, device: torch.device) -> Stepper:
    return build(name, task.shape, microbatches=task.microbatches, seed=task.seed, device=device)


def counts(task: harness.Task, device: torch.device) -> dict[str, Any]:
    """The rank that needs most memory speaks for all; the other counts are rank 0's, and equal by construction."""
    (name,) = task.contenders
    batches, scratch = task.batches(device), Path(task.result).with_suffix(f".{dist.get_rank()}.trace.json")

    def build_step() -> Any:
        contender = built(name, task, device)
        return lambda i: contender.step(batches[i % len(batches)])

    found = dataclasses.asdict(count(build_step, device, scratch, task.warmup, all_reducing(name, task.ranks)))
    every = harness.gathered(found, task.ranks)
    return {**found, **{key: max(each[key] for each in every) for key in MEMORY}}


MEMORY = ("peak_memory_bytes", "peak_tensor_bytes")


def result(bench: Bench, timed: dict[str, Any], counted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result of the bench, as its JSON has it.

    timed: the timing run's result; counted: one counting run's by contender, empty under --no-counts.
    """
    check_losses(timed["losses"])
    shape = bench.shape
    seconds = timed["seconds"]
    tokens = bench.ranks * shape.batch * shape.seq
    contenders: dict[str, Any] = {}
    for name in bench.contenders:
        step = spread([s * 1e3 for s in seconds[name]])
        contenders[name] = {
            "step_ms": step,
            "cpu_ms": spread([s * 1e3 for s in timed["cpu_seconds"][name]]),
            "tokens_per_s": tokens / step["median"] * 1e3,
            "last_loss": timed["losses"][name],
            **({"program": timed["programs"][name]} if timed["programs"][name] else {}),
            **counted.get(name, {}),
        }
        if name in counted:
            contenders[name]["sent_bytes"] = sum(c["sent"] for c in counted[name]["collectives"].values())
    first, *others = bench.contenders
    peers = [name for name in contenders if not names.read(name).ours]
    return {
        "malloc": MALLOC_TUNED if any(names.read(name).tuned for name in contenders) else {},
        "tokens_per_step": tokens,
        "first": first,
        "over_first": {name: ratios(seconds[name], seconds[first]) for name in others},
        "over_peers": {
            name: {peer: over_peer(bench, name, peer, seconds, counted) for peer in peers} for name in bench.schedules
        },
        "unlike_program": unlike_program(contenders),
        "contenders": contenders,
    }


def over_peer(
    bench: Bench, name: str, peer: str, seconds: Mapping[str, Sequence[float]], counted: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """One of ours over one peer: time and memory, with the goals where there are some."""
    out: dict[str, Any] = {"time": ratios(seconds[name], seconds[peer]), "time_goal": goal(TIME_GOALS, bench, peer)}
    if counted:
        out |= {key: counted[name][key] / counted[peer][key] for key in MEMORY}
        out["peak_memory_goal"] = goal(MEMORY_GOALS, bench, peer)
    return out


def unlike_program(contenders: Mapping[str, Any]) -> list[str]:
    """Sentences about ours that were counted, one for each whose collectives send other bytes than its program says."""
    out = []
    for name, found in contenders.items():
        if "program" in found and "sent_bytes" in found:
            told = sum(found["program"]["wire_bytes"].values())
            # norms on a deterministic mesh are sums of bins, sent in a message that does not count as scalars
            bins = 4096 if "deterministic" in names.read(name).features else 0
            if not told <= found["sent_bytes"] <= told + bins:
                out.append(f"{name}: a rank sent {found['sent_bytes']} bytes in a step, its program says {told}")
    return out


KINDS = {
    "all_gather": "gathers",
    "reduce_scatter": "reduce-scatters",
    "all_to_all": "all-to-alls",
    "all_reduce": "all-reduces",
    "broadcast": "broadcasts",
    "send": "sends",
}
"""The columns of collectives, in order."""


def times(found: dict[str, Any]) -> Rows:
    out: Rows = {}
    for name, c in found["contenders"].items():
        step = c["step_ms"]
        over = found["over_first"].get(name)
        out[name] = {
            "step ms": f"{step['median']:.1f}",
            "p10 - p90": apart(step, 1),
            f"over {found['first']}": f"{over['median']:.3f}" if over else "1",
            "p10 - p90 ": apart(over) if over else "",
            "CPU ms": f"{c['cpu_ms']['median']:.1f}",
            "tokens/s": f"{c['tokens_per_s']:,.0f}",
        }
    return out


def comparison(found: dict[str, Any], ours: str) -> Rows:
    """Rows of `ours` over each peer; a goal that is missed is marked."""
    out: Rows = {}
    for peer, c in found["over_peers"][ours].items():
        time = c["time"]
        out[peer] = {
            "step": f"{time['median']:.3f}",
            "p10 - p90": apart(time),
            "goal": reached(time["median"], c["time_goal"]),
        }
        if "peak_memory_bytes" in c:
            out[peer] |= {
                "peak memory": f"{c['peak_memory_bytes']:.3f}",
                "goal ": reached(c["peak_memory_bytes"], c["peak_memory_goal"]),
                "live tensors": f"{c['peak_tensor_bytes']:.3f}",
            }
    return out


def traffic(found: dict[str, Any]) -> Rows:
    kinds = {kind for c in found["contenders"].values() for kind in c["collectives"]}
    return {
        name: {"sent MiB": mib(c["sent_bytes"])}
        | {KINDS[kind]: str(c["collectives"].get(kind, {"count": 0})["count"]) for kind in KINDS if kind in kinds}
        for name, c in found["contenders"].items()
    }


def memory(found: dict[str, Any]) -> Rows:
    out: Rows = {}
    for name, c in found["contenders"].items():
        program = c.get("program")
        out[name] = {
            "peak MiB": mib(c["peak_memory_bytes"]),
            "live tensors MiB": mib(c["peak_tensor_bytes"]),
            "shards MiB": mib(program["shard_bytes"]) if program else "",
            "slots MiB": mib(program["slot_bytes"]) if program else "",
            "allocations >= 2 MiB": str(c["weight_size_allocations"]),
        }
    return out


def show(bench: Bench, found: dict[str, Any]) -> Iterator[str | Table]:
    """One contender per row."""
    shape = bench.shape
    parts = f" in {bench.microbatches} microbatches" if bench.microbatches > 1 else ""
    yield (
        f"config {bench.config}: {shape.layers} layers, dim {shape.dim}, ffn {shape.ffn}, seq {shape.seq}, batch "
        f"{shape.batch} per rank{parts}, fp32; {bench.ranks} rank(s) on {bench.device}; {bench.steps} interleaved "
        "steps, medians"
    )
    yield table("per step", times(found))
    for ours in bench.schedules:
        if found["over_peers"][ours]:
            yield table(f"{ours} over", comparison(found, ours))
    if all("sent_bytes" in c for c in found["contenders"].values()):
        yield table("per step and rank", traffic(found))
        if any("send" in c["collectives"] for c in found["contenders"].values()):
            yield "sends: the messages that gathers and reductions of ours are between CPU ranks"
        yield table("per rank", memory(found))
    for sentence in found["unlike_program"]:
        yield f"[red]NOT AS THE PROGRAM SAYS: {sentence}[/red]"
