"""Whether all contenders of a timing run fit into this machine's memory at once: on the CPU its end would be the
kernel's, which kills whom it likes.

With P bytes of fp32 parameters, layers of p bytes, other units of u, and the state cut over k of R ranks, a rank holds

    4 P / k               parameters, gradients, two moments
    2 p + u               weight slots, for k > 1; zero1 and zero2 P; p more for each resident layer or layer ahead;
                          where K layers are one visit, K p for p
    2 p + u               gradient slots, for k > 1; zero1, and all with -defer, P
    (P - u) / (R / 2)     secondary shards of hpz, at most
    8 P / k               with -nofused: updates, new moments and parameters, and what they are made of, for a moment

and once for all contenders, which take turns, the activations of one microbatch.
"""

from __future__ import annotations

import re
from pathlib import Path

from train.bench import names
from train.bench.options import Bench
from train.bench.schedules import parse


class TooMuch(RuntimeError):
    """Contenders that cannot be timed together on this machine."""


PROCESS_BYTES = 500 << 20
"""Python, torch, gloo's buffers: 580 MiB as measured for A, with its activations."""


def process_bytes(bench: Bench) -> int:
    """About what a rank process holds beside the contenders' states; every block keeps 12 tensors [B, S, E] and 4
    [B, S, F] for its backward."""
    shape = bench.shape
    tokens = shape.batch // bench.microbatches * shape.seq
    return PROCESS_BYTES + 4 * tokens * shape.layers * (12 * shape.dim + 4 * shape.ffn)


def held_bytes(bench: Bench, name: str) -> int:
    """About what contender `name` holds on all ranks together during a step, activations apart."""
    shape, ranks = bench.shape, bench.ranks
    layer, others = 4 * (4 * shape.dim**2 + 3 * shape.dim * shape.ffn), 4 * 2 * shape.vocab * shape.dim
    whole = shape.layers * layer + others
    contender = names.read(name)
    if contender.base in ("ddp", "plain") and not contender.ours:
        return ranks * 4 * whole
    builder, options = parse(contender.base) if contender.ours else ("zero3", {})
    two = 2 * contender.unroll * layer + others
    cut = {"ddp": 1, "hsdp": ranks // 2}.get(builder, ranks)
    more = options.get("resident", 0) + contender.unroll * max(0, options.get("prefetch", 1) - 1)
    weights = whole if builder in ("zero1", "zero2") else min(whole, two + more * layer)
    grads = whole if builder == "zero1" or "defer" in options else min(whole, two)
    secondary = (whole - others) // (ranks // 2) if builder == "hpz" else 0
    state = 12 if "nofused" in contender.levers else 4
    return ranks * (state * whole // cut + (weights + grads if cut > 1 else 0) + secondary)


def available_bytes() -> int | None:
    """What the kernel can give to new processes; None where it does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def too_much(bench: Bench, available: int | None) -> str | None:
    """Why the contenders cannot be timed together in `available` bytes, with what each needs; None where they can."""
    if bench.device != "cpu" or available is None:
        return None
    held = {name: held_bytes(bench, name) for name in bench.contenders}
    needed = sum(held.values()) + len({names.read(name).tuned for name in held}) * bench.ranks * process_bytes(bench)
    if needed <= available:
        return None
    each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in held.items())
    return (
        f"all contenders together need about {needed / 2**30:.1f} GiB on {bench.ranks} ranks, and "
        f"{available / 2**30:.1f} GiB are available (in GiB: {each}). Time them in several commands that begin with "
        f"the same --schedules {bench.schedules[0]}: ratios over it compare"
    )


def check(bench: Bench) -> None:
    """Raises TooMuch where the contenders do not fit into what is available now."""
    if sentence := too_much(bench, available_bytes()):
        raise TooMuch(sentence)
