"""`make gpu-check`: what needs CUDA, run with the interpreter that started this file, on whatever that machine has.

Installs nothing. A step whose needs are missing is skipped with a line that says what is missing; a step that runs and
fails makes the exit status 1. A machine without CUDA skips everything and exits 0.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("torch", "optree", "einops", "jaxtyping")
STEPS = (
    ("tests marked gpu", ("pytest", "pytest_timeout", "hypothesis"), ("-m", "pytest", "-m", "gpu", "-q")),
    ("benchmark", ("tyro", "rich"), ("-m", "train", "bench", "--device", "cuda")),
)
PYTHON = (3, 11)
NO_TESTS_COLLECTED = 5


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def main() -> int:
    if sys.version_info[:2] < PYTHON:
        print(f"gpu-check: skipped: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 is needed")
        return 0
    if absent := missing(LIBRARY):
        print(f"gpu-check: skipped: {sys.executable} has no {', '.join(absent)}; name another with PYTHON=")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: skipped: torch {torch.__version__} of {sys.executable} finds no CUDA device on this machine")
        return 0
    for index in range(torch.cuda.device_count()):
        print(f"gpu-check: cuda:{index} is {torch.cuda.get_device_name(index)}, torch {torch.__version__}", flush=True)
    failed = []
    for name, needs, command in STEPS:
        if absent := missing(needs):
            print(f"gpu-check: {name}: skipped: {sys.executable} has no {', '.join(absent)}")
            continue
        print(f"gpu-check: {name}: python {' '.join(command)}", flush=True)
        status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if command[1] == "pytest" and status == NO_TESTS_COLLECTED:
            print("gpu-check: no test is marked gpu")
        elif status:
            failed.append(f"{name} (exit status {status})")
    print(f"gpu-check: failed: {', '.join(failed)}" if failed else "gpu-check: done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
