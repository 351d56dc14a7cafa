"""Processes of a bench: each reads a task and writes a result, JSON both, and what it prints goes to a log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `train` and `models` are run from it and are in no wheel."""


class Process:
    """`python -m MODULE FOLDER/NAME.json`, in a session of its own: what it starts, compilers say, ends with it."""

    def __init__(self, module: str, task: Mapping[str, Any], folder: Path, name: str, env: Mapping[str, str]) -> None:
        file, self.log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps(task))
        path = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
        with self.log.open("wb") as sink:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, str(file)],
                env={**env, "PYTHONPATH": path, "KINETO_LOG_LEVEL": "5"},  # else every profiled step prints a line
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Kills it, and what it started, if they have not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self, lines: int = 30) -> list[str]:
        """The last lines that it printed."""
        return self.log.read_text(errors="replace").splitlines()[-lines:] or ["(nothing)"]


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Replaces the file in one go: a reader finds one result or another, and never a part."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, path)
