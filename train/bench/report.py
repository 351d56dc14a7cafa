"""Turns the runs' raw figures into one result (a plain dict, printed by `--json`) and that into a table."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from train.bench.options import MALLOC_TUNED, SHAPES, Bench

LOSS_TOLERANCE = 1e-4
"""Relative difference of the last losses beyond which the contenders did not do the same work."""


class LossesDiffer(RuntimeError):
    """The contenders did not train the same model; their times are not comparable."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 (linear between the two nearest values)."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def check_losses(losses: Mapping[str, float]) -> None:
    """Refuses unless all contenders ended at one loss."""
    reference = next(iter(losses.values()))
    # Written so that a NaN anywhere refuses too.
    if not all(abs(loss - reference) <= LOSS_TOLERANCE * abs(reference) for loss in losses.values()):
        shown = ", ".join(f"{name} {loss:.7g}" for name, loss in losses.items())
        raise LossesDiffer(
            f"the losses of the last step differ by more than {LOSS_TOLERANCE:g} relative: {shown}. The contenders did "
            "not do the same work, so their times are not reported; find out which one is wrong first"
        )


def sent_bytes(collectives: Mapping[str, Mapping[str, int]], ranks: int) -> int:
    """Bytes that each rank has to send per step: of a gather or a reduction the other ranks' part of the message, of an
    all-reduce twice that. Implementations may send more (gloo's reduce-scatter is an all-reduce)."""
    share = (ranks - 1) / ranks
    factor = {"all_gather": share, "reduce_scatter": share, "all_to_all": share, "all_reduce": 2 * share}
    return round(sum(factor.get(kind, 1.0) * c["bytes"] for kind, c in collectives.items()))


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = Path("/proc/cpuinfo")
    models = (
        [l.split(":", 1)[1].strip() for l in cpu.read_text().splitlines() if l.startswith("model name")]
        if cpu.exists()
        else []
    )
    out: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
        out["gpus"] = torch.cuda.device_count()
    return out


def versions() -> dict[str, str]:
    """Of what is timed, down to the allocator's library."""
    out = {"python": platform.python_version(), "torch": torch.__version__, "libc": " ".join(platform.libc_ver())}
    for package in ("yafsdp_fn", "optree"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "run from a checkout"
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        out["revision"] = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        out["revision"] = "unknown"
    return out


def result(bench: Bench, command: str, timed: dict[str, Any], counted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """timed: the timing run's result; counted: one counting run's by contender, empty under --no-counts."""
    check_losses(timed["losses"])
    shape = SHAPES[bench.config]
    tokens = bench.ranks * shape.batch * shape.seq
    contenders: dict[str, Any] = {}
    for name in bench.contenders:
        step = spread([s * 1e3 for s in timed["seconds"][name]])
        contenders[name] = {
            "step_ms": {**step, "all": [round(s * 1e3, 4) for s in timed["seconds"][name]]},
            "cpu_ms": spread([s * 1e3 for s in timed["cpu_seconds"][name]]),
            "tokens_per_s": tokens / step["median"] * 1e3,
            "last_loss": timed["losses"][name],
            **({"program": timed["programs"][name]} if timed["programs"][name] else {}),
            **counted.get(name, {}),
        }
        if name in counted:
            contenders[name]["sent_bytes"] = sent_bytes(counted[name]["collectives"], bench.ranks)
    mine = timed["seconds"]["ours"]
    ratio = {p: spread([a / b for a, b in zip(mine, timed["seconds"][p], strict=True)]) for p in bench.peers}
    memory = ("peak_memory_bytes", "peak_tensor_bytes")
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "options": dataclasses.asdict(bench),
        "malloc": MALLOC_TUNED if bench.malloc_tuned else {},
        "shape": {**dataclasses.asdict(shape), "dtype": "float32"},
        "tokens_per_step": tokens,
        "ratio": ratio,
        "memory_ratio": {p: {k: counted["ours"][k] / counted[p][k] for k in memory} for p in bench.peers}
        if counted
        else {},
        "contenders": contenders,
    }


def cells(name: str, found: dict[str, Any]) -> dict[str, str]:
    """One contender's column of the table, by row."""
    c = found["contenders"][name]
    out = {
        "step, ms": f"{c['step_ms']['median']:.1f}",
        "  p10 - p90": f"{c['step_ms']['p10']:.1f} - {c['step_ms']['p90']:.1f}",
        "tokens/s": f"{c['tokens_per_s']:,.0f}",
    }
    if ratio := found["ratio"].get(name):
        out["ours / it"] = f"{ratio['median']:.3f}"
        out["  p10 - p90 "] = f"{ratio['p10']:.3f} - {ratio['p90']:.3f}"
    out["CPU time, ms"] = f"{c['cpu_ms']['median']:.1f}"
    if "peak_memory_bytes" in c:
        mib = 2**20
        out["peak memory, MiB"] = f"{c['peak_memory_bytes'] / mib:,.0f}"
        out["live tensors, MiB"] = f"{c['peak_tensor_bytes'] / mib:,.0f}"
        out["allocations >= 2 MiB"] = str(c["weight_size_allocations"])
        out |= {f"{kind}s": str(v["count"]) for kind, v in c["collectives"].items()}
        out["sent, MiB"] = f"{c['sent_bytes'] / mib:,.1f}"
    return out


def show(found: dict[str, Any], console: Console) -> None:
    """The result as a table, one contender per column; per step and rank."""
    options, shape, versions, machine = (found[key] for key in ("options", "shape", "versions", "machine"))
    tuned = ", malloc tuned" if options["malloc_tuned"] else ""
    heading = (
        f"config {options['config']}: {shape['layers']} layers, dim {shape['dim']}, ffn {shape['ffn']}, "
        f"seq {shape['seq']}, batch {shape['batch']} per rank, fp32; {options['ranks']} rank(s) on {options['device']}"
        f"{tuned}; {options['steps']} interleaved steps, medians"
    )
    columns = {name: cells(name, found) for name in found["contenders"]}
    rows = sorted({row for column in columns.values() for row in column}, key=ROWS.index)
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row, *(column.get(row, "") for column in columns.values()))
    console.print(heading, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']:.1f}; torch {versions['torch']}, "
        f"python {versions['python']}, revision {versions['revision']}\n{found['command']}",
        highlight=False,
        soft_wrap=True,
    )


ROWS = [
    *("step, ms", "  p10 - p90", "ours / it", "  p10 - p90 ", "tokens/s", "CPU time, ms"),
    *("peak memory, MiB", "live tensors, MiB", "allocations >= 2 MiB"),
    *("all_gathers", "reduce_scatters", "all_reduces", "all_to_alls", "broadcasts", "sends", "sent, MiB"),
]
"""The table's rows, in order."""
