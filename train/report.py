"""What a run leaves behind and shows: `metrics.jsonl`, TensorBoard events, one live line. Rank 0 does all of it.

metrics.jsonl   one object a line: step, loss, grad_norm, lr, tokens_per_s, step_ms, mem_bytes;
                held-out losses: step, eval_loss
tensorboard/    the same numbers
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch.utils.tensorboard import SummaryWriter


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


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: of the CUDA allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def truncate(path: Path, step: int) -> None:
    """Drops the lines after `step` from metrics.jsonl, so that a resumed run reads like an unbroken one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] > step:
                continue
        except json.JSONDecodeError:  # the line that a killed run was writing
            continue
        kept.append(line + "\n")
    path.write_text("".join(kept))


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class Report:
    """Writes the files and the terminal.

    folder: None on all ranks but 0, which write no files (and have a quiet console)
    steps: of the whole run; first: the step that a resumed run starts after
    """

    def __init__(self, folder: Path | None, *, steps: int, first: int, log_every: int, console: Console) -> None:
        self.console = console
        self._steps, self._first, self._log_every = steps, first, log_every
        self._file: TextIO | None = None
        if folder is not None:
            truncate(folder / "metrics.jsonl", first)
            self._file = (folder / "metrics.jsonl").open("a", buffering=1)
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1 if first else None)
        self._started: float | None = None
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[line]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("", total=steps, completed=first, line="starting")

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()
            self._board.close()

    def train(self, record: Record) -> None:
        """The numbers of one training step."""
        step, mfu = record.step, record.mfu
        self._write({key: value for key, value in record._asdict().items() if value is not None})
        now = time.monotonic()
        if self._started is None:  # when the first step began: what came before it will not come again
            self._started = now - record.step_ms / 1e3
        remaining = (now - self._started) / (step - self._first) * (self._steps - step)
        parts = [
            f"loss {record.loss:.4f}",
            f"{record.tokens_per_s:,.0f} tok/s",
            f"{record.step_ms:.0f} ms",
            *([] if mfu is None else [f"MFU {mfu:.1%}"]),
            f"ETA {duration(remaining)}",
        ]
        self._progress.update(self._task, completed=step, line="  ".join(parts))
        if not self.console.is_terminal and (step % self._log_every == 0 or step in (self._first + 1, self._steps)):
            extra = f"grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}"
            self.say(f"step {step:>5}/{self._steps}  {parts[0]}  {extra}  " + "  ".join(parts[1:]))

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after `step` steps."""
        self._write({"step": step, "eval_loss": loss})
        self.say(f"step {step:>5}/{self._steps}  held-out loss {loss:.4f} nats a byte ({loss / math.log(2):.3f} bits)")

    def checkpoint(self, step: int, folder: Path) -> None:
        self.say(f"step {step:>5}/{self._steps}  checkpoint {folder}")

    def say(self, text: str) -> None:
        """A line above the live one."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        for key, value in record.items():
            if key != "step":
                kind = "eval/loss" if key == "eval_loss" else f"train/{key}"
                self._board.add_scalar(kind, value, int(record["step"]))
