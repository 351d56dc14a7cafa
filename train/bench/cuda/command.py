"""The command: sections in processes of their own, one JSON.

for section in sections:
    left = budget - elapsed
    start a process; end it after min(limit, left)        # it has written what it had found by then
    result[section] = what it wrote, and how it ended
    write result
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

from train.bench import report
from train.bench.cuda.gpu_options import Gpu
from train.bench.cuda.sections import SECTIONS, Section
from train.bench.processes import Process, write

PROGRAM = "python -m train bench"
LEAST_S = 10.0
"""A section is not begun with less time left."""
OWN = ("--budget-s", "--out", "--sections")


def wanted(argv: Sequence[str]) -> bool:
    """Whether `argv` asks for this command: `--device cuda` and nothing of the other bench, or an option of this."""
    if not argv or not argv[0].startswith("--"):
        return False
    words = {part for word in argv for part in word.split("=")}
    return bool(words & set(OWN)) or words - {"--skip-without-device"} == {"--device", "cuda"}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 1 where a section failed or this machine has no such device."""
    try:
        options = tyro.cli(Gpu, args=list(argv), prog=PROGRAM)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        sentence = "bench: --device cuda needs a CUDA device and a CUDA build of torch, and this machine has none"
        print(f"{sentence}{': skipped' if options.skip_without_device else ''}", file=sys.stderr)
        return 0 if options.skip_without_device else 1
    found = run(options, SECTIONS, shlex.join([*PROGRAM.split(), *argv]))
    print(f"bench: {found['note'] + ': ' if found['note'] else ''}{options.json}")
    return 0 if all(each["ended"] in ("well", "skipped") for each in found["sections"].values()) else 1


def run(options: Gpu, sections: dict[str, Section], command: str) -> dict[str, Any]:
    """Runs the sections that `options` names, and returns what was written."""
    begun = time.monotonic()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine() | gpu(),
        "versions": report.versions() | {"cuda": torch.version.cuda, "nccl": nccl()},
        "budget_s": options.budget_s,
        "note": "tiny models on the CPU: a check of the command; times mean nothing" if options.device == "cpu" else "",
        "sections": {},
    }
    rate: float | None = None
    for name in options.sections or sections:
        section = sections[name]
        left = options.budget_s - (time.monotonic() - begun)
        if left < LEAST_S:
            found["sections"][name] = {"ended": "skipped", "why": f"{left:.0f} s of the budget were left"}
        else:
            setting = {"device": options.device, "pictures": str(options.json.parent), "matmul_flops": rate}
            print(f"bench: {name}", flush=True)
            found["sections"][name] = one = process(section, setting, min(left, section.limit_s))
            rate = one.get("found", {}).get("cluster", {}).get("matmul_flops", rate)
            print(f"bench: {name}: {one['ended']}, {one['seconds']:.0f} s", flush=True)
            for goal, met in one.get("found", {}).get("goals", {}).items():
                print(f"bench: {name}: {goal}: {'met' if met else 'not met'}", flush=True)
        found["seconds"] = time.monotonic() - begun
        write(options.json, found)
    return found


def process(section: Section, setting: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Runs one section, with all that it starts: how it ended, after how many seconds, and what it found."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        result = folder / "result.json"
        task = {
            "module": section.module,
            "arguments": section.arguments,
            "setting": setting,
            "result": str(result),
        }
        begun = time.monotonic()
        started = Process("train.bench.cuda.section", task, folder, "section", os.environ)
        try:
            status = started.popen.wait(limit_s)
            ended = "well" if status == 0 else f"with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"after its limit of {limit_s:.0f} s"
        finally:
            started.end()
        out: dict[str, Any] = {"ended": ended, "seconds": time.monotonic() - begun}
        if result.exists():
            out["found"] = json.loads(result.read_text())
        if ended != "well":
            out["last lines"] = started.tail()
        return out


def gpu() -> dict[str, Any]:
    """Of the GPU, where there is one: what the figures depend on."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver, largest clock, power limit": driver,
    }


def nccl() -> str | None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
