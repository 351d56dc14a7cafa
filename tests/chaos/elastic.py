"""`python -m tests.chaos.elastic`: one run of torchrun agents, of four ranks, then two, then three; each example is
trained on exactly once.

    four agents, a rank each    two are killed, with their ranks       the others meet again, and resume
    two agents                  another one joins                      all three meet again, and resume
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.harness import LONG, ROOT, Wrong, children, kill, until
from tests.train.inside import flags, text
from train.launch.command import free_port

WINDOWS = 1600


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    options = {
        "--nnodes": "1:4",
        "--nproc-per-node": 1,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"127.0.0.1:{port}",
        "--rdzv-id": "elastic",
        "--rdzv-conf": "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--max-restarts": 20,
        "--monitor-interval": 0.2,
    }
    torchrun = [str(part) for pair in options.items() for part in pair]
    clm = flags(folder, "--steps", str(10**6), "--checkpoint-every", "10")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *torchrun,
        str(Path(__file__).with_name("rank.py")),
        "clm",
    ]
    environment = {"PYTHONPATH": str(ROOT), "CHAOS": str(folder), "OMP_NUM_THREADS": "1"}
    # else an agent that joins later waits, in torch 2.13, for an address that nobody writes
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "out").open("ab") as out:
        return subprocess.Popen([*command, *clm], env=os.environ | environment, stdout=out, stderr=out)


def notes(folder: Path) -> list[dict[str, Any]]:
    """Of every step of every rank, as they ended: what `rank.py` wrote down."""
    found = []
    for path in folder.glob("rows-*"):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(found, key=lambda note: float(note["at"]))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder, port = Path(name), free_port()
        text(folder, WINDOWS)
        agents: list[subprocess.Popen[bytes]] = []

        def steps(ranks: int, number: int, since: float) -> bool:
            done = {note["step"] for note in notes(folder) if note["ranks"] == ranks and note["at"] > since}
            return len(done) >= number

        def train(ranks: int, number: int) -> None:
            since = time.time()
            until(lambda: steps(ranks, number, since), f"no {number} steps on {ranks} ranks", LONG)
            print(f"{ranks} ranks: the first of {number} steps after {time.time() - since:.1f} s", flush=True)

        try:
            agents += [agent(folder, port)]  # the first one keeps the store
            time.sleep(1)
            agents += [agent(folder, port) for _ in range(3)]
            train(4, 60)
            kill([pid for each in agents[2:] for pid in (each.pid, *children(each.pid))])
            train(2, 60)
            agents.append(agent(folder, port))
            train(3, 60)
            until(lambda: sum(len(note["rows"]) for note in last(folder)) >= WINDOWS, "the epoch does not end", LONG)
        except Wrong as wrong:
            print(f"FAILED: {wrong}\n{(folder / 'out').read_text()}", file=sys.stderr)
            return 1
        finally:
            kill([pid for each in agents for pid in (*children(each.pid), each.pid)])
        steps_of = Counter(note["ranks"] for note in last(folder) if note["rank"] == 0)
        read = [row for note in last(folder) for row in note["rows"]][:WINDOWS]
        if len(set(read)) != WINDOWS:
            print(f"FAILED: of {WINDOWS} examples {len(set(read))} were trained on", file=sys.stderr)
            return 1
        print(f"{WINDOWS} examples, each once, in {dict(steps_of)} steps by ranks")
    return 0


def last(folder: Path) -> list[dict[str, Any]]:
    """The steps that the run consists of, rank by rank: what was lost with a rank was done again, and counts then."""
    found: dict[int, list[dict[str, Any]]] = {}
    for note in notes(folder):
        same = [each for each in found.get(note["step"], []) if each["attempt"] == note["attempt"]]
        found[note["step"]] = [*same, note]
    return sorted((note for each in found.values() for note in each), key=lambda note: (note["step"], note["rank"]))


if __name__ == "__main__":
    sys.exit(main())
