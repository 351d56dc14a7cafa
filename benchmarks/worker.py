"""One process of a bench: `python -m benchmarks.worker TASK.json`, started by `harness.Process`, never by hand.

Ends without the interpreter's teardown: torn down in Python's order, threads of process groups outlive what they use
and abort the process now and then, after the work is done.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.harness import function


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    status = 0
    try:
        function(task.pop("call"))(task)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
