"""`make gpu-check`: what needs CUDA, run with the interpreter that started this file, on whatever that machine has.

    python .ci/gpu_check.py [--wheels DIR] [--limit-s S] [tests | bench] [options of pytest, or of the bench]

    tests    those marked gpu       -> docs/benchmarks/gpu_tests.json, rewritten after each test
    bench    every GPU figure       -> docs/benchmarks/gpu.json, rewritten after each section

Installs nothing: what the machine lacks comes out of a folder of wheels, into a folder that is gone afterwards.

The exit status is 0 where all that was asked for has run and passed; what could not run is named, and is no success. A
step that fails, or does not end in time, does not stop the other one. Failures are printed and written when they
happen: whatever ends this early, a time limit or SIGTERM, they are on the screen and in the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
PYTHON = (3, 11)
LIMIT_S = 570.0
"""Of everything: machines are often lent for ten minutes a command."""
TESTS_S = 170.0
"""Of the tests, where the benchmark comes after them."""
GRACE_S = 15.0
"""Between SIGTERM and SIGKILL; the benchmark gets so much less as its own budget, and ends by itself."""

LIBRARY = ("torch", "optree", "typing_extensions", "einops", "jaxtyping", "wadler_lindig")
MACHINE = """
import json, sys, torch
there = torch.cuda.is_available()
nccl = torch.cuda.nccl.version() if there and torch.distributed.is_nccl_available() else None
print(json.dumps({
    "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": nccl and ".".join(map(str, nccl)),
    "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if there else [],
}))
"""
"""In a process of its own: a context of this one would take memory from the sections."""


class Step(NamedTuple):
    """needs: modules; command: after `python -m`, in front of further arguments"""

    needs: tuple[str, ...]
    command: tuple[str, ...]


TESTS = RESULTS / "gpu_tests.json"
STEPS = {
    "tests": Step(
        (*LIBRARY, "pytest"),
        ("pytest", "-m", "gpu", "-q", "--tb=no", "-rN", "--continue-on-collection-errors", "-p", "gpu_tests"),
    ),
    "bench": Step(
        (*LIBRARY, "numpy", "tyro", "docstring_parser", "typeguard", "rich", "markdown_it", "mdurl", "pygments"),
        ("train", "bench", "--device", "cuda"),
    ),
}


def say(words: str) -> None:
    print(f"gpu-check: {words}", flush=True)


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def machine(env: dict[str, str]) -> str | None:
    """Prints what is there, and leaves it in `env` for results; returns why no step can run, or None."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", MACHINE], env=env, capture_output=True, text=True)
    if found.returncode:
        return f"torch cannot be imported: {(found.stderr.strip().splitlines() or ['(it says nothing)'])[-1]}"
    env["GPU_CHECK_MACHINE"] = found.stdout.splitlines()[-1]
    seen = json.loads(env["GPU_CHECK_MACHINE"])
    gpus = seen.pop("gpus")
    say(", ".join(f"{name} {version}" for name, version in seen.items()))
    for index, name in enumerate(gpus):
        say(f"cuda:{index} is {name}")
    return None if gpus else f"torch {seen['torch']} of {sys.executable} finds no CUDA device on this machine"


def ended(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str | None:
    """Runs `python -m command`; None where it ended well, else how it ended. Nothing that it started outlives it."""
    started = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=dict(env), start_new_session=True)
    try:
        status = started.wait(limit_s)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if started.poll() is None:
                started.terminate()
                started.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def run(name: str, arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> str | None:
    """Runs a step; None where it ran and passed, else what is to be said about it."""
    if name == "tests":
        TESTS.unlink(missing_ok=True)  # or an earlier command's results would be told
    own = {"tests": ("--gpu-json", str(TESTS)), "bench": ("--budget-s", f"{max(1.0, limit_s - GRACE_S):.0f}")}[name]
    command = (*STEPS[name].command, *own, *arguments)  # of an option that comes twice the last one counts
    say(f"{name}: python -m {' '.join(command)}")
    words = ended(command, env, limit_s)
    return told(words) if name == "tests" else words


def told(words: str | None) -> str | None:
    """How the tests ended, with what their JSON tells beyond the exit status."""
    try:
        found = json.loads(TESTS.read_text())
    except (OSError, ValueError):
        return words or "no results"
    say(f"tests: {found['passed']} passed, {len(found['failed'])} failed, {len(found['skipped'])} skipped")
    for name in found["failed"]:
        say(f"tests: failed: {name}")
    if words is None and not found["passed"]:
        return "no test has run"
    running = f", in {found['running']}" if found["running"] else ""
    return f"{words}{running}" if words else None


def check(names: Sequence[str], arguments: Sequence[str], wheels: Path | None, limit_s: float) -> int:
    """Runs the steps called `names`; the exit status."""
    begun = time.monotonic()
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        path = [str(ROOT), str(Path(__file__).parent), *([scratch] if wheels else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}
        if wheels is not None:
            if missing(["packaging"]):
                say(f"nothing has run: {sys.executable} has no packaging, which comes with pytest and reads wheels")
                return 1
            from wheels import Unusable, unpack

            try:
                taken = unpack(wheels, Path(scratch))
            except Unusable as error:
                say(str(error))
                return 1
            say(f"from {wheels}: " + ", ".join(f"{name} {version}" for name, version in taken.items()))
            sys.path.append(scratch)  # for `missing`
        for name in names:
            if absent := missing(STEPS[name].needs):
                problems[name] = f"not run: {sys.executable} has no {', '.join(absent)}"
                say(f"{name}: {problems[name]}; give a folder of wheels, WHEELS=DIR: docs/gpu.md")
        able = [name for name in names if name not in problems]
        if not able or (why := machine(env)):
            say("nothing has run" + (f": {why}" if able else ""))
            return 1
        RESULTS.mkdir(exist_ok=True)
        for name in able:
            left = limit_s - (time.monotonic() - begun)
            last = name == able[-1]
            if why := run(name, arguments, env, left if last else min(left, TESTS_S)):
                problems[name] = why
                say(f"{name}: {why}")
    if problems:
        say("failed: " + "; ".join(f"{name} ({why})" for name, why in problems.items()))
    else:
        say("done")
    return 1 if problems else 0


def terminated(number: int, frame: object) -> None:
    """Ends what was started; a second signal must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("stopped by SIGTERM; docs/benchmarks has what was found until then")
    sys.exit(128 + signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what this machine lacks")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"seconds for everything, {LIMIT_S:.0f}")
    parser.add_argument("step", nargs="?", choices=[*STEPS, "all"], default="all")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest, or for the bench")
    options = parser.parse_args(argv)
    if sys.version_info[:2] < PYTHON:
        say(f"nothing has run: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 is needed")
        return 1
    signal.signal(signal.SIGTERM, terminated)
    names = list(STEPS) if options.step == "all" else [options.step]
    return check(names, options.arguments, options.wheels, options.limit_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
