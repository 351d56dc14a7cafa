"""Turns the runs' raw figures into one result, a plain dict: `--json` prints it, `tables` shows it."""

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

from train.bench import names
from train.bench.goals import PEAK_MEMORY, TIME, goal
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


def heading(command: str) -> dict[str, Any]:
    """What every result begins with."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def result(bench: Bench, command: str, timed: dict[str, Any], counted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """timed: the timing run's result; counted: one counting run's by contender, empty under --no-counts."""
    check_losses(timed["losses"])
    shape, seconds = bench.shape, timed["seconds"]
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
    return {
        **heading(command),
        "options": {key: value for key, value in dataclasses.asdict(bench).items() if key not in ("json", "save")},
        "malloc": MALLOC_TUNED if bench.malloc_tuned or any(names.read(name).tuned for name in contenders) else {},
        "shape": {**dataclasses.asdict(shape), "dtype": "float32"},
        "tokens_per_step": tokens,
        "first": first,
        "over_first": {name: ratios(seconds[name], seconds[first]) for name in others},
        "over_peers": {
            name: {peer: over_peer(bench, name, peer, seconds, counted) for peer in contenders if is_peer(peer)}
            for name in bench.schedules
        },
        "unlike_program": unlike_program(contenders),
        "contenders": contenders,
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def is_peer(name: str) -> bool:
    return not names.read(name).ours


MEMORY = ("peak_memory_bytes", "peak_tensor_bytes")


def over_peer(
    bench: Bench, name: str, peer: str, seconds: Mapping[str, Sequence[float]], counted: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """One of ours over one peer: time and memory, with the goals where there are some."""
    out: dict[str, Any] = {"time": ratios(seconds[name], seconds[peer]), "time_goal": goal(TIME, bench, peer)}
    if counted:
        out |= {key: counted[name][key] / counted[peer][key] for key in MEMORY}
        out["peak_memory_goal"] = goal(PEAK_MEMORY, bench, peer)
    return out


def unlike_program(contenders: Mapping[str, Any]) -> list[str]:
    """Of ours that were counted: a sentence for each whose collectives send other bytes than its program says."""
    out = []
    for name, found in contenders.items():
        if "program" in found and "sent_bytes" in found:
            told = sum(found["program"]["wire_bytes"].values())
            # norms on a deterministic mesh are sums of bins, sent in a message that does not count as scalars
            bins = 4096 if "deterministic" in names.read(name).levers else 0
            if not told <= found["sent_bytes"] <= told + bins:
                out.append(f"{name}: a rank sent {found['sent_bytes']} bytes in a step, its program says {told}")
    return out
