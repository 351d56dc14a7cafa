"""One section: `python -m train.bench.cuda.section TASK.json`, started by `command`, never by hand.

What it has found is written after every part, whole or not at all, so that a time-out loses the part at hand alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from train.bench.cuda import fits
from train.bench.cuda.setting import Setting
from train.bench.processes import write


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    result = Path(task["result"])

    def report(found: dict[str, Any]) -> None:
        write(result, found)

    setting = Setting(**task["setting"])
    if setting.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
        setting = dataclasses.replace(setting, budget=fits.here())
    status = 0
    try:
        importlib.import_module(task["module"]).run(setting, report, *task["arguments"])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torn down in Python's order, threads of process groups outlive what they use now and then


if __name__ == "__main__":
    main()
