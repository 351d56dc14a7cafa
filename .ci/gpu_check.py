"""`make gpu-check`: the first minutes on a GPU, what tells most first, with the interpreter at hand.

    python .ci/gpu_check.py [--plan] [--second | --only STEP ...] [--wheels DIR] [--limit-s S] [--out DIR]

for step in STEPS:
    together: at most five run at once        # only whether numbers are right counts
    alone: the GPU is its own                 # it is timed
    what it finds is a line of OUT/results.jsonl as soon as it is found, and on the disk

Each step is a process of its own with a budget in seconds. One that fails, dies or hangs loses itself alone; a step
for which too little is left of the limit is named and not begun. Nothing is installed: what the machine lacks comes out
of a folder of wheels. In OUT are also log.txt (what each step printed), profiles of a step as trace_*.json.gz, and
results.json: all lines, after one with revision and date. Exit status 0: every step has passed. With --device cpu steps
run on tiny models, and tests are collected.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "gpu-check"
LIMIT_S, SECOND_LIMIT_S = 480, 150
"""Of the first command, and of a second one with what is left of a quarter of an hour."""
AT_ONCE = 5
RESERVED_S = 240
"""Left by steps that run together to those that are timed."""
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
LOG_LINES = 200
NEEDED = (
    "torch",
    "pytest",
    "optree",
    "einops",
    "jaxtyping",
    "numpy",
    "tyro",
    "docstring_parser",
    "typeguard",
    "rich",
    "tensorboard",
)


class Step(NamedTuple):
    """A process of its own.

    budget, likely: seconds; it is not begun with fewer than `likely` left, and ended after `budget`
    command: after the interpreter, where {json} is the file for what it finds, {out} the folder, {device} the device
    within: the beginning of the command, which runs the rest of it, on a GPU
    """

    budget: int
    likely: int
    together: bool
    what: str
    command: str
    env: dict[str, str] = {}  # noqa: RUF012
    within: str = ""


PYTEST = (
    "-m pytest -q --tb=short -rN --continue-on-collection-errors -p no:cacheprovider -p gpu_tests --gpu-json {json}"
)
ON_GPU = "tests/cuda/test_on_gpu.py"


def tests(budget: int, likely: int, what: str, which: str, *, together: bool = True, **more: Any) -> Step:
    return Step(budget, likely, together, what, f"{PYTEST} {which}", **more)


OWN = "-m {module} {name} --device {{device}} --out {{out}}"


def own(budget: int, likely: int, name: str, what: str, *, together: bool = False, **more: Any) -> Step:
    """A step of `gpu_steps`."""
    return Step(budget, likely, together, what, OWN.format(module="gpu_steps", name=name), **more)


def timed(budget: int, likely: int, name: str, what: str) -> Step:
    """A step of `gpu_times`."""
    return Step(budget, likely, False, what, OWN.format(module="gpu_times", name=name))


def section(budget: int, likely: int, what: str, name: str) -> Step:
    """A section of the bench."""
    words = f"-m benchmarks --section {shlex.quote(name)} --device {{device}} --out {{json}}"
    return Step(budget, likely, False, what, words)


# Attention of cuDNN, which torch takes first on Hopper, need not repeat its bits.
REPEATS = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
# Each tensor is then an allocation of its own, whose end the sanitizer sees.
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
SANITIZER = "compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 20"
SOME = "kept or zero2 or hsdp or hpz or resident"

STEPS = {
    "machine": own(40, 8, "machine", "versions, GPU, NCCL; matrix rate and copy rate: the ceilings"),
    # ---- is it right?
    "readme": tests(60, 25, "the README's code on the GPUs that there are", f"{ON_GPU} -k readme"),
    "oracle": own(
        120, 40, "oracle", "a small Llama by schedule against float64 on the CPU: loss, gradients, steps", together=True
    ),
    "kernels": tests(
        150, 60, "Triton kernels, products, optimizers against references", "tests/optim tests/nn tests/communication"
    ),
    "delays": tests(
        170, 60, "delays on streams, NaN in freed memory: no bit changes",
        f"{ON_GPU} -k 'missing or (delays and 8 and ({SOME}))'", env=REPEATS,
    ),
    "delays2": tests(
        170, 60, "the same, of the other schedules", f"{ON_GPU} -k 'delays and not ({SOME})'", env=REPEATS
    ),
    "host": tests(120, 40, "the host waits for nothing in steady steps", f"{ON_GPU} -k 'host and not readme'"),
    "train20": own(
        100, 40, "train20", "python -m train clm, 20 steps on the GPU and the CPU: losses side by side", together=True
    ),
    "rest": tests(
        120, 30, "offload, timeline",
        "tests/extras/test_offload.py tests/timeline/test_record.py",
    ),
    "traced": own(
        60, 25, "traced", "a loss of more rows than a chunk of the head is traced where there is a GPU", together=True
    ),
    "footprint": tests(100, 40, "peaks of 300M parameters against the plan", "tests/planner/test_footprint.py"),
    "sanitized": own(
        120, 60, "sanitized", "every Triton kernel on odd sizes, its bounds watched by compute-sanitizer",
        together=True, env=NO_CACHE, within=SANITIZER,
    ),
    # ---- how long does it take?
    "perf": timed(110, 50, "perf", "Llama 1B, eager: ours, plain, FSDP2; memory, launches, the host, gaps"),
    "micro": timed(60, 20, "micro", "head, products, attention, embedding, optimizer, norms: ours against torch's"),
    "ranks": tests(
        150, 60, "2 ranks on this GPU (NCCL of the wheel) against one rank",
        "tests/cuda/test_ranks_on_one_gpu.py -k 'on_one_gpu_have and not 4'", together=False,
    ),
    "compiled": timed(130, 70, "compiled", "the same Llama with compiled blocks"),
    # ---- the second command
    "ranks4": tests(
        90, 45, "4 ranks on this GPU; one stops, the others name what they wait for",
        "tests/cuda/test_ranks_on_one_gpu.py -k '(on_one_gpu_have and 4) or on_one_gpu_name'", together=False,
    ),
    "7b/64": section(70, 45, "rank 0 of 64, emulated: ours, FSDP2, floor", "emulated, llama2-7b/64"),
    "memory": section(70, 45, "peaks against the plan's", "memory"),
}  # fmt: skip
"""In their order. Whether results are right comes before how long they take; ranks that share the GPU need an NCCL of a
wheel that no GPU has run yet, so that they come after what needs none."""
SECOND = ("ranks4", "7b/64", "memory")
FIRST = tuple(name for name in STEPS if name not in SECOND)


# ---- results


def emit(out: Path, step: str, **found: Any) -> None:
    """Adds a line to the results, whole, and to the disk."""
    line = json.dumps({"step": step, **found}, default=str) + "\n"
    handle = os.open(out / "results.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.fsync(handle)
    os.close(handle)
    print(line[:1500], end="", flush=True)


def code() -> dict[str, str]:
    """The revision, if this is a repository, and the digest of all code: a revision that was edited is another one."""
    folders = ("yafsdp_fn", "models", "train", "benchmarks", "tests", ".ci")
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha1(b"".join(file.read_bytes() for file in (*files, ROOT / "README.md"))).hexdigest()[:12]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        revision = ""
    return {"revision": revision or "unknown", "code": digest}


def written(out: Path) -> list[dict[str, Any]]:
    """Returns the lines of all steps; writes them to results.json, to be committed."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    (out / "results.json").write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    return lines


def summary(out: Path) -> bool:
    """Prints a short table, last, since a reply carries the end of the output; tells whether all steps have passed."""
    print("\n=== summary", flush=True)
    passed = True
    for row in written(out):
        if "outcome" in row:
            passed = passed and row["outcome"] == "passed"
            found = row.get("found", {})
            tested = "failed" in found
            counts = f" {len(found['passed'])} passed, {len(found['failed'])} failed" if tested else ""
            print(f"{row['step']:10} {row.get('seconds', '')!s:>6} {row['outcome']}{counts}")
            for test, text in found["failed"].items() if tested else ():
                error = next((line for line in reversed(text.splitlines()) if line.startswith("E ")), "")
                print(f"    FAILED {test}: {error[:160]}")
        elif "failed" in row:
            print(f"    {row['step']}: {row.get('part')}: {str(row['failed'])[:200]}")
        elif "short" in row:
            print(f"    {row['step']}: {row['short']}")
    print(f"all of it is in {out}", flush=True)
    return passed


# ---- running


def environment(wheels: Path | None, out: Path, scratch: Path) -> dict[str, str]:
    """Returns the environment of steps, with what `wheels` has and this machine lacks."""
    path = [str(ROOT), str(Path(__file__).parent), str(scratch)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "5"}
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    if wheels is not None:
        from wheels import Unusable, unpack

        try:
            emit(out, "wheels", taken=unpack(wheels.resolve(), scratch))
        except Unusable as error:
            sys.exit(f"gpu-check: nothing has run: {error}")
        sys.path.append(str(scratch))
        if nccl := list(scratch.glob("nvidia-nccl-*/**/libnccl.so.2")):
            env["GPU_CHECK_NCCL"] = str(nccl[0])
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        emit(out, "wheels", short=f"WARNING: {sys.executable} has no {', '.join(lacking)}: make gpu-wheels")
    return env


def words_of(step: Step, device: str, out: Path, found: Path) -> list[str]:
    """Returns the command of a step. Without a GPU its tests are collected, and nothing is watched."""
    filled = step.command.format(json=shlex.quote(str(found)), out=shlex.quote(str(out)), device=device)
    if " pytest " in filled:
        filled += " -m gpu" if device == "cuda" else " -m gpu --collect-only"
    within = shlex.split(step.within) if device == "cuda" else []
    return [*within, sys.executable, *shlex.split(filled)]


class Running:
    """A step's process, its log and the file of what it finds."""

    def __init__(
        self, name: str, words: list[str], env: dict[str, str], out: Path, found: Path, limit_s: float
    ) -> None:
        self.name, self.out, self.found, self.limit_s = name, out, found, limit_s
        self.begun, self.log = time.monotonic(), found.with_suffix(".log")
        with self.log.open("wb") as sink:
            how: dict[str, Any] = {"stdout": sink, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            try:
                self.process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **how)
            except OSError as error:  # a tool that this machine lacks
                words = [sys.executable, "-c", f"import sys; sys.exit({str(error)!r})"]
                self.process = subprocess.Popen(words, start_new_session=True, **how)

    def over(self) -> bool:
        """Tells whether it has ended by itself or its time is up."""
        return self.process.poll() is not None or time.monotonic() - self.begun > self.limit_s

    def end(self) -> None:
        """Ends it with all that it has started, and writes down how it went."""
        status = self.process.poll()
        if status is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        seconds, lines = time.monotonic() - self.begun, self.log.read_text(errors="replace").splitlines()
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found["found"] = json.loads(self.found.read_text())
        outcome = ended(status, self.limit_s)
        emit(self.out, self.name, outcome=outcome, seconds=round(seconds, 1), **found)
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n==== {self.name}: {outcome}, {seconds:.1f} s\n" + "\n".join(lines[-LOG_LINES:]) + "\n")


def ended(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"not done after {limit_s:.0f} s"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"exit status {status}" if status else "passed"


def check(names: Sequence[str], device: str, wheels: Path | None, limit_s: float, out: Path) -> bool:
    """Runs the steps called `names` within `limit_s`; tells whether all have passed."""
    deadline = time.monotonic() + limit_s
    out.mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    reserved = RESERVED_S if any(not STEPS[name].together for name in names[1:]) else 0

    def stopped(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut this short
        for each in running:
            each.end()
        emit(out, "all", outcome=f"stopped by {signal.Signals(number).name}")
        written(out)
        sys.exit(128 + number)

    def wait(most: int) -> None:
        """Waits until no more than so many are running."""
        while len(running) > most:
            time.sleep(0.1)
            for each in [each for each in running if each.over()]:
                running.remove(each)
                each.end()

    signal.signal(signal.SIGTERM, stopped)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        scratch = Path(folder)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        emit(out, "all", device=device, date=date, limit_s=limit_s, **code())
        env = environment(wheels, out, scratch)
        for name in names:
            step = STEPS[name]
            wait(AT_ONCE - 1 if step.together else 0)
            left = deadline - time.monotonic() - GRACE_S - (reserved if step.together else 0)
            if left < step.likely:
                emit(out, name, outcome=f"left out: {max(left, 0):.0f} s are left for it")
                continue
            found = scratch / f"{name.replace('/', '-')}.json"
            words = words_of(step, device, out, found)
            running.append(Running(name, words, {**env, **step.env}, out, found, min(step.budget, left)))
            if not step.together:
                wait(0)
        wait(0)
    return summary(out)


def plan(names: Sequence[str], limit_s: float) -> None:
    """Prints the steps in their order, and by when each has ended, if all take as long as is likely."""
    free_at, end = [0.0] * AT_ONCE, 0.0
    for name in names:
        step = STEPS[name]
        begin = min(free_at) if step.together else max(free_at)
        end = begin + step.likely
        if step.together:
            free_at[free_at.index(begin)] = end
        else:
            free_at = [end] * AT_ONCE
        how = "together" if step.together else "alone"
        print(f"{name:10} {how:8} at most {step.budget:3} s, likely over after {end:3.0f} s  {step.what}")
    last = max(free_at)
    print(
        f"in all: likely {last:.0f} s, at most {limit_s:.0f} s: what is not over then is ended, what it found is kept"
    )


def no_device() -> str | None:
    """Says why nothing can run on CUDA, if so. A process of its own asks: a context of this one would take memory."""
    ask = "import torch; print(torch.__version__, torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", ask], capture_output=True, text=True)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["(it says nothing)"])[-1]
        return f"torch cannot be imported: {last}"
    version, there = found.stdout.split()
    return None if there == "True" else f"torch {version} of {sys.executable} finds no CUDA device on this machine"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py")
    parser.add_argument("--plan", action="store_true", help="print the steps, their order and budgets; run nothing")
    parser.add_argument("--second", action="store_true", help=f"the steps of a second command: {', '.join(SECOND)}")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help="these steps")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what this machine lacks")
    parser.add_argument("--limit-s", type=float, help=f"seconds, {LIMIT_S}; of a second command {SECOND_LIMIT_S}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"a folder, {OUT.relative_to(ROOT)}")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models; tests are collected"
    )
    options = parser.parse_args(argv)
    names = tuple(options.only or (SECOND if options.second else FIRST))
    limit_s = options.limit_s or (SECOND_LIMIT_S if options.second else LIMIT_S)
    if options.plan:
        plan(names, limit_s)
        return 0
    if options.device == "cuda" and (why := no_device()):
        print(f"gpu-check: nothing has run: {why}", flush=True)
        return 1
    return 0 if check(names, options.device, options.wheels, limit_s, options.out.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
