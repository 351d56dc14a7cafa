"""The machine and the code that a figure or a run is of."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: `train` and `models` are run from it and are in no wheel."""


def cpu() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of the drivers of NVIDIA, AMD, and of either under Windows."""


def gpus() -> int:
    """The number of GPUs that torch sees. Without a driver torch, which takes seconds, is not imported to look."""
    if not any(map(os.path.exists, DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def revision(*flags: str) -> str | None:
    """The revision of the code that runs; None outside of a repository. flags: of `git describe`"""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", *flags]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
