"""One training run after another, and what happens to them.

unbroken run -> its losses and parameters
while events are left:
    start a run; while it goes on: wait for a moment; an event; was anything left behind? start again if it ended
    its losses, parameters and moments are those of the unbroken one, bit for bit
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.forked import Forked
from tests.harness.pages import ROOT
from yafsdp_fn import checkpoint

RANK = Path(__file__).with_name("rank.py")
LONG = 300.0
"""Seconds that nothing here takes, on a machine however busy."""
TIMEOUT = 8.0
"""Seconds of a collective: as long nobody notices that a rank has frozen."""
RESTARTS = 9
"""Of a launcher, before the harness has to start another one."""


class Wrong(AssertionError):
    """A run that did not survive, or left something behind."""


def until(what: Callable[[], Any], why: str, seconds: float = LONG) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end:
            raise Wrong(f"after {seconds} s: {why}")
        time.sleep(0.01)
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pids: Sequence[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            if len(os.listdir(f"/proc/{pid}/task")) > 1:
                return "threads"  # that of a killed process whose first thread has ended may still hold its files
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("gone", "Z")]


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Chaos:
    """Runs in `folder`. steps: of each; every: between checkpoints; say: is told what happens; forks: launchers and
    ranks are forks of a process that has imported all"""

    def __init__(
        self, folder: Path, *, seed: int, steps: int, every: int, say: Callable[[str], None], forks: bool = False
    ) -> None:
        self._popen, self._module = (Forked, "tests.harness.launching") if forks else (subprocess.Popen, "train")
        self.folder, self.steps, self.every, self.say = folder, steps, every, say
        self.draw = random.Random(seed)
        self.counts: dict[str, int] = {}
        self.recovered: dict[str, list[float]] = {}
        """By kind of event, seconds from each to the next step: where it ends processes, of others."""
        self._event = ""
        self._name = ""
        self._launcher: subprocess.Popen[bytes] | Forked | None = None
        (folder / "text.txt").write_text("".join(f"{i:08d}" for i in range(2000)))

    # ---- a run

    @property
    def launcher(self) -> subprocess.Popen[bytes] | Forked:
        assert self._launcher is not None
        return self._launcher

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath("runs", self._name, *parts)

    def complete(self) -> bool:
        newest = checkpoint.latest(self.path("checkpoints"))
        return newest is not None and newest.name == f"step-{self.steps:08d}"

    def start(self) -> None:
        """The run, or its continuation where it has a checkpoint, unless that is of its last step."""
        if self.complete():
            return
        resume = checkpoint.latest(self.path("checkpoints")) is not None
        settings = {
            "--runs": self.folder / "runs",
            "--name": self._name,
            "--model": "tiny",
            "--data.files": self.folder / "text.txt",
            "--data.heldout-fraction": 0,
            "--data.seq-len": 8,
            "--data.batch": 2,
            "--optim.warmup": 2,
            "--steps": self.steps,
            "--eval-every": 0,
            "--checkpoint-every": self.every,
            "--device": "cpu",
            "--timeout": TIMEOUT,
        }
        flags = [str(part) for pair in settings.items() for part in pair] + ["--resume"] * resume
        command = [sys.executable, "-m", self._module, "launch", "--ranks", "2", "--max-restarts", str(RESTARTS)]
        environment = {"PYTHONPATH": str(ROOT), "CHAOS": str(self.folder), "OMP_NUM_THREADS": "1"}
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            self._launcher = self._popen(
                [*command, str(RANK), "clm", *flags], cwd=ROOT, env=os.environ | environment, stdout=out, stderr=err
            )

    def end(self) -> None:
        """Of the launcher, whatever happens."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()

    def notes(self) -> list[tuple[int, int, float]]:
        """`(pid, step, time)` of the steps so far."""
        path = self.folder / "steps"
        found = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
        return [(int(pid), int(step), float(at)) for pid, step, at in (words for words in found if len(words) == 3)]

    def run(self, name: str, events: Iterator[str]) -> None:
        """To its end, with as many events on the way as there is time for."""
        self._name = name
        self.start()
        for event in events:
            if not self.moment():
                break
            self.counts[event] = self.counts.get(event, 0) + 1
            self.say(f"{name}: {event}")
            self._event = event
            getattr(self, event.replace(" ", "_"))()
            self.look()
        self.launcher.wait(LONG)
        if self.launcher.returncode and not self.complete():
            raise Wrong(f"{name} ended with status {self.launcher.returncode}")
        self.look(complete=True)

    def moment(self) -> bool:
        """Waits for one, at the start of an attempt or while it trains. Whether the run still goes on then."""
        if self.draw.random() < 0.25:
            time.sleep(self.draw.uniform(0.0, 2.0))
        else:
            before = len(self.notes())
            until(lambda: len(self.notes()) > before or self.ended, "no step")
            time.sleep(self.draw.uniform(0.0, 0.02 * self.steps))
        return not self.ended

    def look(self, complete: bool = False) -> None:
        """What must be true at any moment of a run."""
        newest = checkpoint.latest(self.path("checkpoints")) if self.path().exists() else None
        if newest is not None:
            json.loads((newest / "manifest.json").read_text())
        path = self.path("metrics.jsonl")
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]
        if steps != list(range(1, len(steps) + 1)) or (complete and len(steps) != self.steps):
            raise Wrong(f"{path}: steps {steps}")
        said = (self.folder / "err").read_text()
        for word in ("Traceback", "passed over", "Exception ignored"):
            if word in said:
                raise Wrong(f"a rank said {word!r}:\n{said}")

    # ---- events

    def ranks(self) -> list[int]:
        """Their pids; none where the launcher has ended."""
        found = until(lambda: children(self.launcher.pid) or self.ended, "no ranks")
        return found if isinstance(found, list) else []

    def after(self, at: float, old: Sequence[int]) -> None:
        """The next step comes, of a process that was not among `old` ones when something happened at `at`."""

        def next_step() -> float | None:
            return next((then for pid, _, then in self.notes() if then > at and pid not in old), None)

        found = until(lambda: next_step() or self.ended, f"no step after: {self._event}")
        if isinstance(found, float):
            self.recovered.setdefault(self._event, []).append(found - at)
        if left := alive(old):
            raise Wrong(f"{self._event}: {left} are left")

    @contextlib.contextmanager
    def survived(self) -> Iterator[list[int]]:
        """What is done inside, to ranks of which it gets the pids: the run goes on after it."""
        old = self.ranks()
        at = time.time()
        yield old
        self.after(at, old)

    def kill_a_rank(self) -> None:
        with self.survived() as old:
            kill(old[self.draw.randrange(2) :][:1])

    def kill_all_ranks(self) -> None:
        with self.survived() as old:
            kill(old)

    def freeze_rank_0(self) -> None:
        self._freeze(0)

    def freeze_rank_1(self) -> None:
        self._freeze(1)

    def _freeze(self, rank: int) -> None:
        """For good: its process stops, and nobody continues it."""
        until(lambda: len(self.ranks()) > rank or self.ended, "no ranks")
        with self.survived() as old, contextlib.suppress(ProcessLookupError):
            for pid in old[rank:][:1]:
                os.kill(pid, signal.SIGSTOP)

    def kill_inside_a_save(self) -> None:
        old, order = self.ranks(), self.folder / f"kill-{self.draw.randrange(2)}"
        order.write_text(str(self.draw.randrange(12)))
        until(lambda: not order.exists() or self.ended, "no save")
        if order.exists():  # the run came to its end before
            order.unlink()
        else:
            self.after(time.time(), old)

    def kill_the_launcher(self) -> None:
        with self.survived() as old:
            self.end()
            until(lambda: not alive(old), "ranks outlive their launcher", 5.0)
            self.start()

    def terminate(self) -> None:
        with self.survived() as old:
            self.launcher.send_signal(signal.SIGTERM)
            status = self.launcher.wait(LONG)
            trained = any(pid in old for pid, _, _ in self.notes())
            if status not in (0,) if trained else status not in (0, 128 + signal.SIGTERM):
                raise Wrong(f"SIGTERM: status {status}")
            if left := alive(old):
                raise Wrong(f"SIGTERM left {left}")
            self.start()

    def fill_the_disk(self) -> None:
        """For a second no file grows, of a run that has begun: one that cannot make its folder is refused, rightly."""
        until(
            lambda: {pid for pid, _, _ in self.notes()} & set(self.ranks()) or self.ended,
            "no step",
        )
        old = self.ranks()
        at = time.time()
        for limit in (64, resource.RLIM_INFINITY):
            for pid in alive(old):
                try:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                except ProcessLookupError:
                    continue
            if limit == 64:
                time.sleep(1.0)
        self.after(at, ())


FROZEN = ("freeze rank 0", "freeze rank 1")
EVENTS = (
    *("kill a rank", "kill all ranks", "kill inside a save", "kill the launcher", "terminate", "fill the disk"),
    *FROZEN,
)


def campaign(
    folder: Path,
    events: Sequence[str],
    *,
    seed: int,
    steps: int,
    every: int,
    say: Callable[[str], None],
    forks: bool = False,
) -> Chaos:
    """All of `events`, in as many runs as it takes. Raises Wrong."""
    chaos = Chaos(folder, seed=seed, steps=steps, every=every, say=say, forks=forks)
    runs = 0
    left = list(events)
    try:
        chaos.run("unbroken", iter(()))
        while left:
            runs += 1
            before = sum(chaos.counts.values())
            chaos.run(f"run-{runs}", iter(left[:8]))
            left = left[sum(chaos.counts.values()) - before :]
            compare(chaos.folder / "runs" / "unbroken", chaos.path())
            shutil.rmtree(chaos.path())
    except Wrong as wrong:
        tails = [f"--- {name}:\n" + (folder / name).read_text()[-4000:] for name in ("out", "err")]
        raise Wrong("\n".join([str(wrong), *tails])) from wrong
    finally:
        chaos.end()
    return chaos


def compare(unbroken: Path, other: Path) -> None:
    """Losses, norms and rates of each step, and every tensor of the last checkpoint."""
    from safetensors.torch import load_file
    from torch import equal

    def numbers(folder: Path) -> list[Any]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]

    if numbers(unbroken) != numbers(other):
        raise Wrong(f"{other}: other losses than the unbroken run's")
    tensors = [
        {f"{path.name}: {name}": part for path in found.glob("*.safetensors") for name, part in load_file(path).items()}
        for found in map(checkpoint.latest, (unbroken / "checkpoints", other / "checkpoints"))
        if found
    ]
    if len(tensors) != 2 or tensors[0].keys() != tensors[1].keys() or not tensors[0]:
        raise Wrong(f"{other}: other tensors than the unbroken run's")
    for name, part in tensors[0].items():
        if not equal(part, tensors[1][name]):
            raise Wrong(f"{other}: {name} has other bits than the unbroken run's")
