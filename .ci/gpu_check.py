"""`make gpu-check`: what needs CUDA, run with the interpreter that started this file, on whatever that machine has.

Installs nothing. A step whose needs are missing is skipped with a line that says what is missing; a step that runs and
fails, or does not end in time, makes the exit status 1, and the next one runs all the same. A machine without CUDA
skips everything and exits 0. All of it ends within ten minutes: the tests after `TESTS_S` at the latest, the benchmark
after the budget that is its default (475 s).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS_S = 100.0
BENCH_S = 495.0
"""A little more than the benchmark's own budget: it ends its sections itself."""
LIBRARY = ("torch", "optree", "einops", "jaxtyping")
STEPS = (
    ("tests marked gpu", ("pytest", "pytest_timeout", "hypothesis"), ("-m", "pytest", "-m", "gpu", "-q"), TESTS_S),
    ("benchmark", ("tyro", "rich", "numpy"), ("-m", "train", "bench", "--device", "cuda"), BENCH_S),
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
    for name, needs, command, limit_s in STEPS:
        if absent := missing(needs):
            print(f"gpu-check: {name}: skipped: {sys.executable} has no {', '.join(absent)}")
            continue
        print(f"gpu-check: {name}: python {' '.join(command)}", flush=True)
        try:
            status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            failed.append(f"{name} (not done after {limit_s:.0f} s)")
            continue
        if command[1] == "pytest" and status == NO_TESTS_COLLECTED:
            print("gpu-check: no test is marked gpu")
        elif status:
            failed.append(f"{name} (exit status {status})")
    print(f"gpu-check: failed: {', '.join(failed)}" if failed else "gpu-check: done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
