"""Triton kernels that take a given time: they watch the GPU's global timer, in nanoseconds, instead of
counting cycles."""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import globaltimer  # type: ignore[import-not-found, import-untyped, unused-ignore]

from yafsdp_fn.planner.cluster import Phase

RESOURCES = ("latency", "node", "network")
PROGRAMS, BLOCK = 8, 8192
"""Copying programs, each on its own multiprocessor like a ring's channels, and float32 elements per block."""


# triton evaluates annotations, and refuses names that are not its own
def _mark(at: tl.tensor) -> None:
    tl.store(at, globaltimer())


def _enter(users: tl.tensor, resource: tl.tensor) -> None:
    tl.atomic_add(users + resource, 1)


def _hold(at: tl.tensor, users: tl.tensor, resource: tl.tensor, nanoseconds: tl.tensor) -> None:
    """Spins, as one warp, until `nanoseconds` have passed since `at`, slower while others use the link; moves `at`."""
    last = tl.load(at)
    left = tl.cast(nanoseconds, tl.float64)
    while left > 0.0:
        # one time for all lanes: an atomic in a loop that some of them have left would hang
        now = tl.max(globaltimer() + tl.zeros([32], dtype=tl.int64), axis=0)
        passed = (now - last).to(tl.float64)
        share = tl.atomic_add(users + resource, 0)
        if resource != 0:
            passed = passed / share.to(tl.float64)
        left -= passed
        last = now
    tl.atomic_add(users + resource, -1)
    tl.store(at, last)


def _copy(
    at: tl.tensor, scratch: tl.tensor, size: tl.tensor, blocks: tl.tensor, nanoseconds: tl.tensor, block: tl.constexpr
) -> None:
    """Copies `blocks` blocks per program, evenly spread over `nanoseconds` since `at`."""
    start = tl.load(at)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for index in range(blocks):
        offset = ((index * programs + program).to(tl.int64) * block) % size + tl.arange(0, block)
        tl.store(scratch + size + offset, tl.load(scratch + offset))
        due = nanoseconds * (index + 1) / blocks
        now = globaltimer()
        while (now - start).to(tl.float32) < due:
            now = globaltimer()


MARK, ENTER, HOLD, COPY = (triton.jit(kernel) for kernel in (_mark, _enter, _hold, _copy))


def mark(at: Tensor) -> None:
    """Writes the current time to `at`, one int64."""
    MARK[(1,)](at)


def hold(at: Tensor, users: Tensor, phase: Phase, scratch: Tensor, nbytes: int) -> None:
    """Lasts until the end of `phase`, which began at the time in `at`, and writes its end there.

    users: int32 per resource, collectives that use it now; scratch: [2, n] float32, of which `nbytes` are copied
    """
    resource = RESOURCES.index(phase.resource)
    nanoseconds = phase.seconds * 1e9
    ENTER[(1,)](users, resource)
    if nbytes:
        blocks = -(-nbytes // (4 * BLOCK * PROGRAMS))
        COPY[(PROGRAMS,)](at, scratch, scratch.shape[1], blocks, nanoseconds, block=BLOCK)
    HOLD[(1,)](at, users, resource, nanoseconds, num_warps=1)
