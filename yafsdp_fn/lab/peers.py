"""Models other libraries' schedules of the same step as programs, for `simulate` only.

    fsdp      gather  | r 0 1 2 3     3 2 1 0    |      root: all units outside stacks, as one; held to the end
              compute |   e 0 1 2 3 h h 3 2 1 0 e|
              reduce  |                 3 2 1 0 r|
    fsdp2     the same; each gather is copied out, and each gradient copied in, by the compute stream
    yafsdp    `zero3` with all units in two slots, and copies

All use one communicator, which runs one collective at a time, in the order of issue: where the stream changes, copies
of no bytes hand it over. Copies are counted per element, with c and r bytes in the dtypes of gathers and reductions.
The sources do not describe allocators and waits of the host, and these do not model them.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from yafsdp_fn import schedules
from yafsdp_fn.interop.fsdp2 import groups_of, program_of
from yafsdp_fn.planner.cluster import A100, Cluster, Phases
from yafsdp_fn.planner.costs import through_memory
from yafsdp_fn.program.ops import Backward, Buffer, ComputeOp, Gather, Op, Reduce, Uses
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.schedules.build import alternating_slots, build
from yafsdp_fn.schedules.builders import Schedule, zero1, zero2
from yafsdp_fn.schedules.remat import Remat, policy

COMMUNICATOR: Buffer = ("communicator",)
FSDP_GROWTH = 48.0
"""Extra bytes per element of `fsdp` for each 1e9 elements of the unit: an empirical figure, fitted to the times of FSDP
in docs/benchmarks/published_yafsdp.csv. FSDP lost more per element there the larger its units were, for an unknown
reason. See docs/accuracy.md."""

AS_RUN = dataclasses.replace(
    A100, name="a100-80g as in YaFSDP's runs", matmul_flops=248e12, network_bandwidth=95.7e9, unit_overhead=6e-3
)
"""The preset with the extra time of YaFSDP's published runs, on 8 to 32 nodes: so many seconds per unit and step,
fitted to docs/benchmarks/published_yafsdp.csv together with its products and network. Its cause is unknown, and LLM
Foundry's runs on one node of the same GPUs do not have it: use it only for comparisons with those runs. See
docs/accuracy.md."""


class Copy(NamedTuple):
    """A copy of `nbytes` on `stream` that a peer makes and this toolkit does not. It is simulated, never run.

    reads, writes: its buffers on the scoreboard
    """

    units: tuple[int, ...]
    stream: str
    nbytes: float
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    def uses(self) -> Uses:
        return list(self.reads), list(self.writes)

    def phases(self, cluster: Cluster) -> Phases:
        return through_memory(cluster, self.nbytes)


def yafsdp(*, remat: Remat | str = "none") -> Schedule:
    """YaFSDP, ZeRO-3, without hpz: `zero3`, but embedding and head alternate between the two slots as layers do.

    The compute stream copies each gradient into its buffer, 2 c; it is cast before its reduction, c + r, if the dtypes
    differ.
    """

    def build_yafsdp(trace: Trace) -> Program:
        slots = alternating_slots(trace.visits, tuple(unit._replace(stack="all") for unit in trace.units))
        return _with_copies(
            build(trace, slots, slots, prefetch=1, remat=policy(remat)),
            computed=lambda size: 2 * size.gather,
            reduced=_cast,
        )

    return build_yafsdp


def fsdp(*, remat: Remat | str = "none", growth: float = FSDP_GROWTH) -> Schedule:
    """torch's FullyShardedDataParallel, a flat parameter per layer, backward prefetch.

    What a backward leaves in a slot is not gathered again for the next microbatch, as it was when this was fitted.

    The compute stream joins the gradients of a flat parameter's views, 2 c; they are cast, c + r, if the dtypes differ,
    and divided, 2 r, before the reduction.

    growth: extra copies of a reduction, in bytes per element for each 1e9 elements of the unit; models a measured loss
        of unknown cause
    """

    def reduced(size: Size) -> float:
        return _cast(size) + 2 * size.reduce + growth * size.numel**2 / 1e9

    return lambda trace: _with_copies(
        program_of(trace, groups_of(trace, True), policy(remat), hold=True),
        computed=lambda size: 2 * size.gather,
        reduced=reduced,
    )


def fsdp2(**settings: Any) -> Schedule:
    """torch's fully_shard: the program of `ya.schedules.fsdp2`, with its arguments, and the copies of torch's code.

    The compute stream copies each gathered unit out into its parameters, 2 c, and gradients in, c + r.
    """
    inside = schedules.fsdp2(**settings)
    return lambda trace: _with_copies(
        inside(trace),
        gathered=lambda size: 2 * size.gather,
        computed=lambda size: size.gather + size.reduce,
    )


def zero(stage: int, *, remat: Remat | str = "none") -> Schedule:
    """ZeRO-1 or ZeRO-2 as DeepSpeed, InternLM and Megatron's distributed optimizer run it by default: the weights are
    gathered as a whole after the update, before anything computes; gradients are reduced beside the backward.

    stage 1 reduces once a step, 2 in every microbatch. The compute stream adds each gradient to its bucket, 2 c + r.
    """
    if stage not in (1, 2):
        raise ValueError(f"zero({stage}): expected stage 1 or 2; fsdp() is ZeRO-3")
    schedule = (zero1 if stage == 1 else zero2)(remat=remat)

    def build_zero(trace: Trace) -> Program:
        ops = schedule(trace).ops
        gathers = [op for op in ops if isinstance(op, Gather)]
        slots = tuple(("slot", 0, slot) for op in gathers for slot in op.slots)
        whole = Copy((), "compute", 0, reads=slots)
        rest = [op for op in ops if not isinstance(op, Gather)]
        program = _with_copies(
            Program(trace, tuple(rest)),
            computed=lambda size: 2 * size.gather + size.reduce,
        )
        return Program(trace, cast("tuple[Op, ...]", (*gathers, *[whole] * bool(gathers), *program.ops)))

    return build_zero


class Size(NamedTuple):
    """The size of some units: elements, and bytes as gathered and as reduced."""

    numel: int
    gather: float
    reduce: float


def _size(trace: Trace, ids: Iterable[int]) -> Size:
    units = [trace.units[unit] for unit in ids]
    return Size(sum(u.numel for u in units), sum(u.gather_bytes for u in units), sum(u.reduce_bytes for u in units))


Bytes = Callable[[Size], float]
"""The bytes of a copy for units of a size; 0 where there is none."""


def _cast(size: Size) -> float:
    """Gradients are cast from the dtype of gathers to that of reductions, where they differ."""
    return size.gather + size.reduce if size.gather != size.reduce else 0.0


def _with_copies(
    program: Program,
    *,
    gathered: Bytes = lambda size: 0,
    computed: Bytes,
    reduced: Bytes = lambda size: 0,
) -> Program:
    """Adds copies to `program`: on the compute stream after gathers and backwards, and before reductions."""
    trace = program.trace
    out = list[Op | Copy]()
    turn = "gather"
    fresh: dict[int, int] = {}  # unit -> slot that nothing has copied out of

    def copied(units: tuple[int, ...], stream: str, of_size: Bytes, **slots: tuple[Buffer, ...]) -> None:
        nbytes = of_size(_size(trace, units))
        if nbytes:
            out.append(Copy(units, stream, nbytes, **slots))

    for op in program.ops:
        if isinstance(op, Gather | Reduce) and op.stream != turn:
            for stream in (turn, op.stream):
                out.append(Copy((), stream, 0, writes=(COMMUNICATOR,)))
            turn = op.stream
        if isinstance(op, Gather):
            fresh.update(zip(op.units, op.slots, strict=True))
        if isinstance(op, Reduce):
            copied(op.units, "reduce", reduced, reads=_slots("grad slot", op.grad_slots))
        if isinstance(op, ComputeOp):
            new = tuple(unit for unit in trace.visits[op.visit].units if unit in fresh)
            copied(new, "compute", gathered, reads=_slots("slot", map(fresh.pop, new)))
        out.append(op)
        if isinstance(op, Backward):
            trained = trace.visits[op.visit].trained
            copied(trained, "compute", computed, writes=_slots("grad slot", op.grad_slots))
    return Program(trace, cast("tuple[Op, ...]", tuple(out)))


def _slots(kind: str, numbers: Iterable[int]) -> tuple[Buffer, ...]:
    return tuple((kind, 0, number) for number in numbers)
