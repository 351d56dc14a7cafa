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
from rich import box
from rich.console import Console
from rich.table import Table

from train.bench.options import MALLOC_TUNED, Bench

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
    shape, seconds = bench.shape, timed["seconds"]
    tokens = bench.ranks * shape.batch * shape.seq
    contenders: dict[str, Any] = {}
    for name in bench.contenders:
        step = spread([s * 1e3 for s in seconds[name]])
        contenders[name] = {
            "step_ms": {**step, "all": [round(s * 1e3, 4) for s in seconds[name]]},
            "cpu_ms": spread([s * 1e3 for s in timed["cpu_seconds"][name]]),
            "tokens_per_s": tokens / step["median"] * 1e3,
            "last_loss": timed["losses"][name],
            **({"program": timed["programs"][name]} if timed["programs"][name] else {}),
            **counted.get(name, {}),
        }
        if name in counted:
            contenders[name]["sent_bytes"] = sum(c["sent"] for c in counted[name]["collectives"].values())
    first, *others = bench.contenders
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
        "first": first,
        "over_first": {
            name: spread([a / b for a, b in zip(seconds[name], seconds[first], strict=True)]) for name in others
        },
        "memory_over_first": {name: {k: counted[name][k] / counted[first][k] for k in memory} for name in others}
        if counted
        else {},
        "unlike_program": unlike_program(contenders),
        "contenders": contenders,
    }


def unlike_program(contenders: Mapping[str, Any]) -> list[str]:
    """Of ours that were counted: a sentence for each whose collectives send other bytes than its program says."""
    out = []
    for name, found in contenders.items():
        if "program" in found and "sent_bytes" in found:
            told = sum(found["program"]["wire_bytes"].values())
            if found["sent_bytes"] != told:
                out.append(f"{name}: a rank sent {found['sent_bytes']} bytes in a step, its program says {told}")
    return out


WIDTH = 200
"""Of the console for the tables, whatever the terminal's: they are Markdown, which must not be cut short."""

Rows = dict[str, dict[str, str]]
"""Contender -> column -> cell."""

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
        step, over = c["step_ms"], found["over_first"].get(name)
        out[name] = {
            "step ms": f"{step['median']:.1f}",
            "p10 - p90": f"{step['p10']:.1f} - {step['p90']:.1f}",
            f"over {found['first']}": f"{over['median']:.3f}" if over else "1",
            "p10 - p90 ": f"{over['p10']:.3f} - {over['p90']:.3f}" if over else "",
            "CPU ms": f"{c['cpu_ms']['median']:.1f}",
            "tokens/s": f"{c['tokens_per_s']:,.0f}",
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


def mib(size: int) -> str:
    return f"{size / 2**20:,.{1 if size >= 10 << 20 else 2}f}"


def table(corner: str, rows: Rows) -> Table:
    """As Markdown, to paste into a page; print it on a console wide enough to leave every cell whole."""
    out = Table(box=box.MARKDOWN)
    out.add_column(corner, no_wrap=True)
    for column in next(iter(rows.values())):
        out.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        out.add_row(name, *cells.values())
    return out


def show(found: dict[str, Any], console: Console) -> None:
    """The result as tables, one contender per row."""
    options, shape, versions, machine = (found[key] for key in ("options", "shape", "versions", "machine"))
    tuned = ", malloc tuned" if options["malloc_tuned"] else ""
    gpus = f"{machine['gpus']} x {machine['gpu']}, " if "gpu" in machine else ""
    parts = f" in {options['microbatches']} microbatches" if options["microbatches"] > 1 else ""
    console.print(
        f"config {options['config']}: {shape['layers']} layers, dim {shape['dim']}, ffn {shape['ffn']}, "
        f"seq {shape['seq']}, batch {shape['batch']} per rank{parts}, fp32; {options['ranks']} rank(s) on "
        f"{options['device']}{tuned}; {options['steps']} interleaved steps, medians",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table("per step", times(found)))
    if all("sent_bytes" in c for c in found["contenders"].values()):
        console.print(table("per step and rank", traffic(found)))
        if any("send" in c["collectives"] for c in found["contenders"].values()):
            console.print("sends: large gathers and reductions of ours between two CPU ranks, as plain exchanges")
        console.print(table("per rank", memory(found)))
    for sentence in found["unlike_program"]:
        console.print(f"NOT AS THE PROGRAM SAYS: {sentence}", style="red", highlight=False, soft_wrap=True)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{gpus}load {machine['load_average']:.1f}; torch {versions['torch']}, "
        f"python {versions['python']}, revision {versions['revision']}\n{found['command']}",
        highlight=False,
        soft_wrap=True,
    )
