"""What fits the device, by the planner's word, before anything is built on it.

    budget  = free memory - RESERVE - SHARE of it all
    needed  = what every state holds between steps + the most that one step needs beside that
    layers  = as many as fit, at most those that the section asks for

Contenders of one section always get one model, so that no ratio is one of depths. Blocks that are compiled are planned
as they run eagerly: a compiler saves another graph for backward, and nobody knows which before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from models import llama
from train.bench.cuda.setting import ADAMW, LEARNING_RATE
from yafsdp_fn.planner.footprint import Memory
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.schedules import Schedule, Trace

RESERVE = 2 * 2**30
"""Bytes for what no plan has: CUDA's context, libraries' workspaces, compiled kernels."""
SHARE = 0.05
"""Of the whole memory, for what the allocator rounds up and cannot join, and for the planner's own error."""


def budget(free: int, total: int) -> int:
    """Bytes that a section may fill of a device with `free` of `total` bytes."""
    return int(free - RESERVE - SHARE * total)


def here() -> int:
    """The budget of the current CUDA device, without what other processes have of it."""
    return budget(*torch.cuda.mem_get_info())


def planned(
    config: llama.Config,
    seq: int,
    schedule: Schedule,
    *,
    ranks: int = 1,
    reduce: torch.dtype = torch.float32,
    fused: bool = True,
    unroll: int = 1,
) -> Memory:
    """The plan of one rank's step of `ours.build`, of one sequence; nothing is allocated."""
    return ya.memory(schedule(_traced(config, seq, ranks, reduce, fused, unroll)))


@functools.lru_cache
def _traced(config: llama.Config, seq: int, ranks: int, reduce: torch.dtype, fused: bool, unroll: int) -> Trace:
    """Most plans are schedules of a few traces."""
    tokens = torch.empty((1, seq), dtype=torch.int64, device="meta")
    tx = ya.optim.adamw(LEARNING_RATE, **ADAMW)
    return ya.trace(
        llama.loss(config, unroll=unroll),
        llama.params(config),
        {"tokens": tokens, "targets": tokens},
        mesh=ranks,
        precision=ya.Precision(compute=torch.bfloat16, reduce=reduce),
        tx=tx if fused else tx._replace(rule=None),
        skip_nonfinite=False,
    )


def beside(plan: Memory) -> int:
    """Bytes that a step needs for itself alone."""
    return plan.peak_bytes - plan.held_bytes


def together(states: Iterable[Sequence[Memory]]) -> int:
    """Bytes of states that are there at once and step in turn; each with the plans that share it and its slots."""
    plans = [list(those) for those in states]
    held = sum(max(plan.held_bytes for plan in those) for those in plans)
    return held + max(beside(plan) for those in plans for plan in those)


class Fit(NamedTuple):
    """layers: that run, of `wanted`; needs, budget: bytes; None: nobody has asked"""

    layers: int
    wanted: int
    needs: int | None = None
    budget: int | None = None

    def words(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "layers": self.layers,
            "layers asked for": self.wanted,
            "planned_bytes": self.needs,
            "budget_bytes": self.budget,
        }


def layers(wanted: int, needs: Callable[[int], int], budget: int | None) -> Fit:
    """The most layers, at most `wanted`, whose bytes are within `budget`; all of them where there is none.

    Raises DoesNotFit where a single layer is too large.
    """
    if budget is None:
        return Fit(wanted, wanted)
    if (all_of_them := needs(wanted)) <= budget:
        return Fit(wanted, wanted, all_of_them, budget)
    if (one := needs(1)) > budget:
        raise DoesNotFit(f"one layer needs {one / 2**30:.1f} GiB, and there are {budget / 2**30:.1f} GiB")
    fits, large = 1, wanted
    while large - fits > 1:
        middle = (fits + large) // 2
        fits, large = (middle, large) if needs(middle) <= budget else (fits, middle)
    return Fit(fits, wanted, needs(fits), budget)
