"""Writes and shows a run's numbers: `metrics.jsonl`, TensorBoard events, one live line. Rank 0 does all of it.

metrics.jsonl   one object a line: step, loss, grad_norm, lr, tokens_per_s, step_ms, mem_bytes;
                held-out losses: step, eval_loss, and of a model with experts eval_router_loss, eval_expert_load;
                of a step whose update was skipped also skipped: true; what is no finite number is null
tensorboard/    the same numbers
events.jsonl    starts, warnings, ends

A disk that is full or gone stops nothing: a warning says what waits, and what is lost.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from train.command_line import say_apart
from train.running.files import Board, Events, Lines


class Record(NamedTuple):
    """One line of metrics.jsonl. `step` counts from 1; loss and grad_norm are over all ranks, before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_ms: float
    mem_bytes: int
    mfu: float | None
    skipped: bool = False
    """Loss or gradient were not finite, and the state stayed as it was."""


Log = Callable[[dict[str, Any]], object]
"""A function that is given each line of metrics.jsonl, without what is null."""

RECENT = 2000
"""Steps whose losses the live line can show."""


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: of the CUDA allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Terminal(Console):
    """A console whose reader may go away (`| head`): the run goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit complains


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class Report:
    """Writes the files and the terminal.

    folder: None on all ranks but 0, which write no files (and have a quiet console)
    steps: of the whole run; first: the step that a resumed run starts after, 0 for one that begins: what an earlier
        start left, that never came to a checkpoint, is dropped
    unit: what a loss is the mean over; logs: called on rank 0, until one raises
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        steps: int,
        first: int,
        log_every: int,
        console: Console,
        unit: str = "byte",
        logs: Sequence[Log] = (),
    ) -> None:
        self.console = console
        self._unit = unit
        self._logs = list(logs)
        self._steps, self._first, self._log_every = steps, first, log_every
        self._leads = folder is not None
        self.events = Events(None if folder is None else folder / "events.jsonl")
        self._lines: Lines | None = None
        if folder is not None:
            last = first or -1  # the held-out loss before the first step is step 0's
            self._lines = Lines(folder / "metrics.jsonl", last, self.warn)
            self._board = Board(folder / "tensorboard", last, self.warn)
        self._at = first
        self._started: float | None = None
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._live = LiveLine(console)

    def __enter__(self) -> Report:
        self._live.__enter__()
        self._live.show([Part(f"step {self._first}/{self._steps}", 0), Part("starting", 1)])
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._live.__exit__(kind, value, tb)
        error = None if kind is None else f"{kind.__name__}: {value}".splitlines()[0][:1000]
        self.events.add("end", step=self._at, error=error)
        if self._lines is not None:
            self._lines.close()
            self._board.close()

    def train(self, record: Record) -> None:
        """The numbers of one training step."""
        step = self._at = record.step
        numbers = {key: finite(value) for key, value in record._asdict().items() if key not in ("mfu", "skipped")}
        more = {"mfu": record.mfu, "skipped": record.skipped or None}
        self._write(numbers | {key: value for key, value in more.items() if value is not None})
        if record.skipped:
            why = "a spike" if math.isfinite(record.loss) and math.isfinite(record.grad_norm) else "not finite"
            self.warn(
                f"step {step}: loss {record.loss}, gradient norm {record.grad_norm}: {why}; its update was skipped"
            )
        now = time.monotonic()
        if self._started is None:  # when the first step began: what came before it will not come again
            self._started = now - record.step_ms / 1e3
        remaining = (now - self._started) / (step - self._first) * (self._steps - step)
        self._losses.append(record.loss)
        self._show(record, f"ETA {duration(remaining)}")

    def _show(self, record: Record, eta: str) -> None:
        step = record.step
        loss = f"loss {record.loss:.4f}"
        rate = f"{record.tokens_per_s:,.0f} tok/s"
        took = f"{record.step_ms:.0f} ms"
        memory = f"{record.mem_bytes / 2**30:.2f} GiB"
        mfu = [] if record.mfu is None else [f"MFU {record.mfu:.1%}"]
        if self.console.is_terminal:
            self._live.show(
                [
                    Part(f"step {step}/{self._steps}", 0),
                    Part(bar(step, self._steps), 6, "green", fancy=True),
                    Part(loss, 1),
                    Part(sparkline([*self._losses]), 4, "cyan", fancy=True),
                    Part(rate, 2),
                    Part(took, 7),
                    *(Part(text, 5) for text in mfu),
                    Part(memory, 8),
                    Part(eta, 3),
                ]
            )
        elif step % self._log_every == 0 or step in (self._first + 1, self._steps):
            extra = f"grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}"
            self.say("  ".join([f"step {step:>5}/{self._steps}", loss, extra, rate, took, *mfu, memory, eta]))

    def evaluation(self, step: int, loss: float, told: Mapping[str, float] | None = None) -> None:
        """The held-out loss after `step` steps. told: what else the model says of the held-out text"""
        told = told or {}
        self._write({"step": step, "eval_loss": finite(loss), **{f"eval_{key}": finite(x) for key, x in told.items()}})
        nats = f"{loss:.4f} nats a {self._unit} ({loss / math.log(2):.3f} bits)"
        more = [f"{key.replace('_', ' ')} {value:.3f}" for key, value in told.items()]
        self.say("  ".join([f"step {step:>5}/{self._steps}  held-out loss {nats}", *more]))

    def checkpoint(self, step: int, folder: Path) -> None:
        self.say(f"step {step:>5}/{self._steps}  checkpoint {folder}")

    def rewind(self, step: int, why: str) -> None:
        """The run goes back to its checkpoint of `step`; lines about later steps are dropped."""
        if self._lines is not None:
            self._lines.rewind(step)
            self._board.rewind(step)
        self._first, self._started = step, None
        self.warn(f"{why}: back to step {step}, and on with the text that comes next")

    def warn(self, text: str) -> None:
        """Warns on standard error, from rank 0."""
        if self._leads:
            say_apart(f"warning: {text}")
            self.events.add("warning", text=text)

    def say(self, text: str) -> None:
        """A line above the live one."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines is None:
            return
        self._lines.write(record)
        for key, value in record.items():
            if key not in ("step", "skipped") and value is not None:
                kind = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
                self._board.add(kind, value, int(record["step"]))
        for log in [*self._logs]:
            try:
                log({key: value for key, value in record.items() if value is not None})
            except Exception as error:
                self._logs.remove(log)
                self.warn(f"--log: {type(error).__name__}: {error}; it is not called again")


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


PAUSE = 0.5
"""Seconds between two redraws, at least."""
MARKS = "▁▂▃▄▅▆▇█"
SPARK, BAR = 20, 16
"""Columns of the sparkline, and of the bar."""


class Part(NamedTuple):
    """A part of a line.

    rank: the highest is left out first where there is no room; fancy: not for terminals of ASCII alone
    """

    text: str
    rank: int
    style: str = ""
    fancy: bool = False


class LiveLine:
    """One line at the end of a terminal, while it is entered. Shows nothing where `console` is no terminal.

        step 120/200 ━━━━━━━━━╸      loss 2.7619 ▇▆▅▅▄▃▃▂▂▁  1,291 tok/s  198 ms  MFU 25.0%  0.51 GiB  ETA 0:16

    It is drawn when a step has ended, twice a second at most: quiet over a slow connection, too. What does not fit into
    the terminal is left out, from the last of `Part`'s order on, so that it stays one line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn = -math.inf
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()  # draws what was given last

    def show(self, parts: Sequence[Part]) -> None:
        """Draws them now, or with a later one."""
        if self._live is None:
            return
        plain = self._console.options.ascii_only
        now = time.monotonic()
        due = now - self._drawn >= PAUSE
        self._live.update(
            fitted([part for part in parts if not (plain and part.fancy)], self._console.width), refresh=due
        )
        if due:
            self._drawn = now


def fitted(parts: Sequence[Part], width: int) -> Text:
    """The parts in order, as many as fit into `width` columns."""
    kept = list(parts)
    while len(kept) > 1 and sum(len(part.text) for part in kept) + 2 * (len(kept) - 1) > width - 1:
        kept.remove(max(kept, key=lambda part: part.rank))
    text = Text("  ").join([Text(part.text, style=part.style) for part in kept])
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def bar(done: int, whole: int) -> str:
    halves = round(2 * BAR * done / max(1, whole))
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(BAR)


def sparkline(values: Sequence[float]) -> str:
    """The later half of `values`, those that are finite, as means over as many parts as there are columns."""
    found = [value for value in values[len(values) // 2 :] if math.isfinite(value)]
    count = min(SPARK, len(found))
    edges = [len(found) * k // count for k in range(count + 1)] if count else []
    means = [sum(found[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    scale = (len(MARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(MARKS[round((value - low) * scale)] for value in means)
