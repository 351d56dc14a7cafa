"""`make gpu-check`: what needs CUDA, by what tells most first, with the interpreter that started this file.

    python .ci/gpu_check.py [--plan] [--only NAME ...] [--wheels DIR] [--limit-s S] [--out FILE]

for section in SECTIONS:
    kept: it has a result, for this code, GPU and versions    # a second command goes on where the first one ended
    else: runs in a process of its own, for its budget and what earlier sections have left of theirs
    what it finds goes into the JSON while it runs            # whoever kills it, or this, loses nothing found before

Installs nothing: what the machine lacks comes out of a folder of wheels, into a folder that is gone afterwards. The
exit status is 0 if every section that was asked for has passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "benchmarks" / "gpu.json"
PYTHON = (3, 11)
WHOLE_S = 2400
"""Of everything, on one GPU of 80 GB."""
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
LINES = 40
"""Of what a section that has not passed printed last, in the JSON."""
PASSED, CUT = "passed", "cut short"

LIBRARY = ("torch", "optree", "typing_extensions", "einops", "jaxtyping", "wadler_lindig")
BENCH = ("numpy", "tyro", "docstring_parser", "typeguard", "rich", "markdown_it", "mdurl", "pygments")


class Section(NamedTuple):
    """seconds: its budget; command: after `python -m`, where {json} is the file for what it finds, and {kept} the one
    with what all sections have found; needs: modules"""

    seconds: int
    command: str
    needs: tuple[str, ...]


def tests(seconds: int, which: str) -> Section:
    command = "pytest -m gpu -q --tb=no -rN --continue-on-collection-errors -p gpu_tests --gpu-json {json} "
    return Section(seconds, command + which, (*LIBRARY, "pytest"))


def times(seconds: int, name: str) -> Section:
    command = f"train bench --section {shlex.quote(name)} --out {{json}} --calibrated {{kept}}"
    return Section(seconds, command, (*LIBRARY, *BENCH))


SECTIONS = {
    "readme": tests(60, "tests/cuda/test_on_gpu.py -k readme"),
    "kernels": tests(180, "tests/optim tests/nn tests/kernels tests/dist"),
    "delays": tests(300, "tests/cuda/test_on_gpu.py -k 'delays or missing'"),
    "graphs": tests(90, "tests/extras/test_cuda_graphs.py"),
    "ranks": tests(360, "tests/cuda/test_ranks_on_one_gpu.py"),
    "host": tests(150, "tests/cuda/test_on_gpu.py -k host"),
    "tests": tests(180, "tests --gpu-kept {kept}"),
    "calibration": times(60, "calibration"),
    "order": times(60, "order"),
    "memory": times(90, "memory"),
    "8b": times(120, "one rank, 8b"),
    "1b": times(90, "one rank, 1b"),
    "70b/256": times(90, "emulated, llama2-70b/256"),
    "7b/64": times(75, "emulated, llama2-7b/64"),
    "levers": times(150, "levers"),
    "34b/256": times(75, "emulated, llama2-34b/256"),
    "13b/128": times(75, "emulated, llama2-13b/128"),
    "34b/128": times(75, "emulated, llama2-34b/128"),
    "8b/64": times(75, "emulated, llama3-8b/64"),
}
"""In their order. Whether results are right comes before how long they take: the time of a wrong step means nothing."""

MACHINE = """
import ctypes, json, subprocess, sys, torch
there, nccl = torch.cuda.is_available(), ctypes.c_int()
try:
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))  # the one that is loaded
except OSError:
    pass
wanted = "driver_version,clocks.max.sm,power.limit,memory.total,compute_mode"
query = ["nvidia-smi", "--query-gpu=" + wanted, "--format=csv,noheader"]
try:
    driver = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
except OSError:
    driver = []
nccl = "{}.{}.{}".format(nccl.value // 10000, nccl.value // 100 % 100, nccl.value % 100) if nccl.value else None
print(json.dumps({
    "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl,
    "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if there else [],
    "driver, largest clock, power limit, memory, compute mode": driver,
}))
"""
"""In a process of its own: a context of this one would take memory from the sections."""


def say(words: str) -> None:
    print(f"gpu-check: {words}", flush=True)


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


class NothingToRun(Exception):
    """No section can run, and why."""


def machine(env: Mapping[str, str]) -> dict[str, Any]:
    """What results depend on, but for the code."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", MACHINE], env=env, capture_output=True, text=True)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["(it says nothing)"])[-1]
        raise NothingToRun(f"torch cannot be imported: {last}")
    seen: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    for name, value in seen.items():
        say(f"{name}: {value}")
    if not seen["gpus"]:
        raise NothingToRun(f"torch {seen['torch']} of {sys.executable} finds no CUDA device on this machine")
    return seen


def code() -> dict[str, str]:
    """The revision, if this is a repository, and the digest of all code: a revision that was edited is another one."""
    folders = ("yafsdp_fn", "models", "train", "tests", ".ci")
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha1(b"".join(file.read_bytes() for file in (*files, ROOT / "README.md"))).hexdigest()[:12]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        revision = ""
    return {"revision": revision or "unknown", "code": digest}


class Results:
    """The JSON, replaced in one go whenever there is something new. Other code's or another GPU's is moved aside."""

    def __init__(self, path: Path, heading: dict[str, Any]) -> None:
        self.path = path
        self.sections: dict[str, Any] = {}
        self.found = {**heading, "sections": self.sections}
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            old = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if all(old.get(key) == heading[key] for key in ("machine", "code")):
            self.sections.update(old["sections"])
        else:
            others = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
            aside = next(other for other in others if not other.exists())
            os.replace(path, aside)
            say(f"results of other code, versions or GPU are now in {aside}")

    def write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(new, self.path)

    def outcome(self, name: str) -> str | None:
        """How a section ended; None if it has not, or was cut short."""
        outcome: str = self.sections.get(name, {}).get("outcome", CUT)
        return None if outcome == CUT else outcome


def run(name: str, section: Section, env: Mapping[str, str], limit_s: float, results: Results, scratch: Path) -> None:
    """Runs a section, with all that it starts, and keeps what it finds while it runs."""
    part, log = (scratch / f"{name.replace('/', '-')}.{kind}" for kind in ("json", "log"))
    command = section.command.format(json=shlex.quote(str(part)), kept=shlex.quote(str(results.path)))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    now = results.sections[name] = {"command": f"python -m {command}", "date": date, "outcome": CUT, "found": {}}
    begun, seen = time.monotonic(), ""
    say(f"{name}: at most {limit_s:.0f} s: python -m {command}")
    with log.open("wb") as sink:
        words, to = [sys.executable, "-m", *shlex.split(command)], {"stdout": sink, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=ROOT, env={**env, "PYTHONUNBUFFERED": "1"}, start_new_session=True, **to)
    said = log.open(errors="replace")

    def keep() -> None:
        nonlocal seen
        print(said.read(), end="", flush=True)
        with contextlib.suppress(OSError, ValueError):
            if (text := part.read_text()) != seen:
                seen, now["found"] = text, json.loads(text)
        now["seconds"] = round(time.monotonic() - begun, 1)
        results.write()

    outcome = CUT
    try:
        while process.poll() is None and time.monotonic() - begun < limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            keep()
        outcome = ended(process.returncode, limit_s)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.terminate()
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        keep()
        if outcome not in (PASSED, CUT):
            found = now["found"]
            outcome += f", in {found['running']}" if found.get("running") else ""
            outcome += f": {found['why']}" if found.get("why") else ""
        said.close()
        now["outcome"] = outcome
        now |= {} if outcome == PASSED else {"last lines": log.read_text(errors="replace").splitlines()[-LINES:]}
        results.write()
        say(f"{name}: {outcome}, {now['seconds']:.0f} s")


def ended(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"not done after {limit_s:.0f} s"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"exit status {status}" if status else PASSED


def prepared(wheels: Path | None, scratch: Path) -> dict[str, str]:
    """The environment of sections, with what `wheels` has and this machine lacks."""
    path = [str(ROOT), str(Path(__file__).parent), str(scratch)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if wheels is not None:
        if missing(["packaging"]):
            raise NothingToRun(f"{sys.executable} has no packaging, which comes with pytest and reads wheels")
        from wheels import Unusable, unpack

        try:
            taken = unpack(wheels, scratch)
        except Unusable as error:
            raise NothingToRun(str(error)) from None
        say(f"from {wheels}: " + ", ".join(f"{name} {version}" for name, version in taken.items()))
        sys.path.append(str(scratch))  # for `missing`
    return env


def check(names: Sequence[str], again: bool, wheels: Path | None, limit_s: float, out: Path) -> int:
    """Runs the sections called `names`, those with a result only if `again`; the exit status."""
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        scratch = Path(folder)
        try:
            env = prepared(wheels, scratch)
            heading = {"machine": machine(env), **code()}
        except NothingToRun as why:
            say(f"nothing has run: {why}")
            return 1
        cuda = str(heading["machine"].get("cuda")).partition(".")[0]
        if nccl := list(scratch.glob(f"nvidia-nccl-cu{cuda}/**/libnccl.so.2")):
            env["GPU_CHECK_NCCL"] = str(nccl[0])
        results, ends, spare = Results(out, heading), dict[str, str](), 0.0
        for name in names:
            section, left = SECTIONS[name], deadline - time.monotonic()
            if not again and (kept := results.outcome(name)):
                ends[name] = kept
                say(f"{name}: {kept}, earlier")
            elif absent := missing(section.needs):
                ends[name] = f"not run: {sys.executable} has no {', '.join(absent)}; WHEELS=DIR: docs/gpu.md"
                say(f"{name}: {ends[name]}")
            elif left < section.seconds:
                ends[name] = (
                    f"not run: it may take {section.seconds} s, {left:.0f} are left; the same command goes on here"
                )
                say(f"{name}: {ends[name]}")
            else:
                begun = time.monotonic()
                run(name, section, env, min(left, section.seconds + spare), results, scratch)
                spare = max(0.0, spare + section.seconds - (time.monotonic() - begun))
                ends[name] = results.outcome(name) or CUT
    for name, outcome in ends.items():
        say(f"{name:12} {outcome}")
    say(f"all of it is in {out}")
    return 0 if all(outcome == PASSED for outcome in ends.values()) else 1


def plan(names: Sequence[str]) -> int:
    """Prints the sections in their order, with the seconds from the start at which each one ends at the latest."""
    until = 0
    for number, name in enumerate(names, 1):
        until += SECTIONS[name].seconds
        print(
            f"{number:2}  {name:12} {SECTIONS[name].seconds:4} s, until {until:4}  python -m {SECTIONS[name].command}"
        )
    return 0


def terminated(number: int, frame: object) -> None:
    """Ends what was started; a second signal must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("stopped by SIGTERM; the JSON has what was found until then")
    sys.exit(128 + signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py")
    parser.add_argument("--plan", action="store_true", help="print the sections, their order and budgets; run nothing")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help="these sections, kept or not")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what this machine lacks")
    parser.add_argument("--limit-s", type=float, default=WHOLE_S, help=f"seconds for this command, {WHOLE_S}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the JSON, {OUT.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    if sys.version_info[:2] < PYTHON:
        say(f"nothing has run: {sys.executable} is Python {sys.version.split()[0]}, and 3.11 is needed")
        return 1
    names = options.only or list(SECTIONS)
    if options.plan:
        return plan(names)
    signal.signal(signal.SIGTERM, terminated)
    return check(names, bool(options.only), options.wheels, options.limit_s, options.out.resolve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
