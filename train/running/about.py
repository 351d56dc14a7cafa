"""What a start of a run is: its command, ranks, device, versions, commit. Written down, not compared: ranks that differ
are refused elsewhere (`together`)."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from train.data.rows import Place
from train.running.elastic import Attempt

ROOT = Path(__file__).resolve().parents[2]


def this_start(place: Place) -> dict[str, Any]:
    """JSON, of rank 0's machine; others are taken to be like it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place.devices))
    return {
        "command": command(),
        "attempt": Attempt.of().number,
        "host": socket.gethostname(),
        "ranks": place.devices,
        "machines": -(-place.devices // local),
        "kind": place.device.type,
        "device": device(place.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "commit": commit(),
    }


def command() -> str:
    """As it can be typed again; how ranks were started (a launcher) is not in it."""
    return shlex.join(["python", "-m", "train", *sys.argv[1:]])


def device(where: torch.device) -> str:
    """The name of the GPU, or of the processor as far as the system tells."""
    if where.type == "cuda":
        memory = torch.cuda.get_device_properties(where).total_memory
        return f"{torch.cuda.get_device_name(where)}, {memory / 2**30:.0f} GiB"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str | None:
    """Of the code that runs, with a `+` where files differ from it; None outside of a repository."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
