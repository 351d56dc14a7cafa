"""What the step of ours is to reach on the CPU, as a ratio over each peer, on the command's own batches.

Time over `plain` is at one rank, all else at two.
"""

from __future__ import annotations

from train.bench import names
from train.bench.options import SHAPES, Bench

TIME = {
    "A": {"fsdp2": 0.80, "fsdp2-tuned": 0.88, "ddp": 1.03, "plain": 1.01},
    "B": {"fsdp2": 0.35, "fsdp2-tuned": 0.57, "ddp": 1.05, "plain": 0.92},
    "C": {"fsdp2": 0.42, "ddp": 1.10, "plain": 1.03},
}
"""Median of step times, step by step."""

PEAK_MEMORY = {"A": {"fsdp2": 0.85, "ddp": 0.90}, "B": {"fsdp2": 0.90, "ddp": 0.80}}
"""Peak memory of the rank that needs most."""


def goal(table: dict[str, dict[str, float]], bench: Bench, peer: str) -> float | None:
    """What `table` says of contender `peer`; None where the run is not one that goals are set for."""
    ours_untuned = not bench.malloc_tuned or peer.endswith("-tuned")
    usual = bench.device == "cpu" and bench.shape == SHAPES[bench.config] and bench.microbatches == 1
    base = peer.removeprefix(names.PEER)
    ranks = 1 if base == "plain" else 2
    if not usual or bench.ranks != ranks or not ours_untuned:
        return None
    return table.get(bench.config, {}).get(base)
