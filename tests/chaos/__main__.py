"""`python -m tests.chaos --events 50`: that many events, drawn by a seed; prints what happened and how long it took to
go on."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.harness import EVENTS, FROZEN, Wrong, campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    began = time.monotonic()
    events = [event for _ in range(options.events) for event in draw.sample(EVENTS, len(EVENTS))][: options.events]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            chaos = campaign(Path(folder), events, seed=options.seed, steps=150, every=15, say=print)
        except Wrong as wrong:
            print(f"FAILED: {wrong}", file=sys.stderr)
            return 1
    counts = ", ".join(f"{count} x {event}" for event, count in sorted(chaos.counts.items()))
    print(f"{sum(chaos.counts.values())} events in {time.monotonic() - began:.0f} s: {counts}")
    print("every run ended with the bits of the unbroken one; no process was left, no step was there twice")
    kinds = {"a rank that froze": FROZEN, "any other event": [event for event in EVENTS if event not in FROZEN]}
    for what, kind in [*kinds.items(), *((event, [event]) for event in EVENTS)]:
        if took := [seconds for event in kind for seconds in chaos.recovered.get(event, [])]:
            median = statistics.median(took)
            longest = max(took)
            print(f"from {what} to the next step: median {median:.1f} s, longest {longest:.1f} s, of {len(took)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
