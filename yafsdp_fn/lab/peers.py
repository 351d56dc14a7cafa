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
from typing import NamedTuple, cast

from yafsdp_fn.planner.cluster import A100, Cluster, Phase
from yafsdp_fn.planner.costs import through_memory
from yafsdp_fn.program.ops import AllReduce, Backward, Buffer, Forward, Gather, Op, Reduce, Uses
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Compute, Trace
from yafsdp_fn.schedules.build import alternating_slots, build
from yafsdp_fn.schedules.builders import Schedule, zero1, zero2
from yafsdp_fn.schedules.remat import Offloading, Remat, policy

COMMUNICATOR: Buffer = ("communicator",)
FSDP_GROWTH = 48.0
"""Extra bytes per element of `fsdp` for each 1e9 elements of the unit: an empirical figure, fitted to the times of FSDP
in docs/benchmarks/published_yafsdp.csv. FSDP lost more per element there the larger its units were, for an unknown
reason. See docs/planner.md."""

AS_RUN = dataclasses.replace(
    A100, name="a100-80g as in YaFSDP's runs", matmul_flops=248e12, network_bandwidth=95.7e9, unit_overhead=6e-3
)
"""The preset with the extra time of YaFSDP's published runs, on 8 to 32 nodes: so many seconds per unit and step,
fitted to docs/benchmarks/published_yafsdp.csv together with its products and network. Its cause is unknown, and LLM
Foundry's runs on
one node of the same GPUs do not have it: use it only for comparisons with those runs. See docs/planner.md."""


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

    def phases(self, cluster: Cluster) -> tuple[Phase, ...]:
        return through_memory(cluster, self.nbytes)


def yafsdp(*, remat: Remat | str = "none") -> Schedule:
    """YaFSDP, ZeRO-3, without hpz: `zero3`, but embedding and head alternate between the two slots as layers do.

    The compute stream copies each gradient into its buffer, 2 c; it is cast before its reduction, c + r, if the dtypes
    differ.
    """

    def build_yafsdp(trace: Trace) -> Program:
        used = dict.fromkeys(unit for visit in trace.visits for unit in visit.units)
        slots = {unit: index % 2 for index, unit in enumerate(used)}
        if any(len({slots[unit] for unit in visit.units}) < len(visit.units) for visit in trace.visits):
            slots = alternating_slots(trace.visits, trace.units)  # a visit of two units that would share a slot
        return _with_copies(
            build(trace, slots, slots, prefetch=1, remat=policy(remat)),
            gathered=lambda size: 0.0,
            computed=lambda size: 2 * size.gather,
            reduced=lambda size: size.gather + size.reduce if size.gather != size.reduce else 0.0,
        )

    return build_yafsdp


def fsdp(*, remat: Remat | str = "none", growth: float = FSDP_GROWTH, traffic: float = 0.0) -> Schedule:
    """torch's FullyShardedDataParallel, a flat parameter per layer, backward prefetch.

    The compute stream joins the gradients of a flat parameter's views, 2 c; they are cast, c + r, if the dtypes differ,
    and divided, 2 r, before the reduction.

    growth: extra copies of a reduction, in bytes per element for each 1e9 elements of the unit; models a measured loss
        of unknown cause
    traffic: bytes per element and backward that collectives move through memory, at the cost of the compute stream: an
        alternative to `Cluster.contention`; use one of the two
    """

    def reduced(size: Size) -> float:
        cast_bytes = size.gather + size.reduce if size.gather != size.reduce else 0.0
        return cast_bytes + 2 * size.reduce + growth * size.numel**2 / 1e9

    return lambda trace: _with_copies(
        Program(trace, tuple(_fsdp(trace, policy(remat)))),
        gathered=lambda size: 0.0,
        computed=lambda size: 2 * size.gather + traffic * size.numel,
        reduced=reduced,
    )


def fsdp2(*, remat: Remat | str = "none") -> Schedule:
    """torch's fully_shard, applied to each layer and to the whole.

    The compute stream copies each gathered unit out into its parameters, 2 c, and gradients in, c + r. It has not been
    compared with any published time.
    """
    return lambda trace: _with_copies(
        Program(trace, tuple(_fsdp(trace, policy(remat)))),
        gathered=lambda size: 2 * size.gather,
        computed=lambda size: size.gather + size.reduce,
        reduced=lambda size: 0.0,
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
            gathered=lambda size: 0.0,
            computed=lambda size: 2 * size.gather + size.reduce,
            reduced=lambda size: 0.0,
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


def _with_copies(
    program: Program,
    *,
    gathered: Callable[[Size], float],
    computed: Callable[[Size], float],
    reduced: Callable[[Size], float],
) -> Program:
    """Adds copies to `program`: on the compute stream after gathers and backwards, and before reductions.

    Each function returns the bytes for units of a size.
    """
    trace, out, turn = program.trace, list[Op | Copy](), "gather"
    fresh: dict[int, int] = {}  # unit -> slot that nothing has copied out of
    for op in program.ops:
        if isinstance(op, Gather | Reduce) and op.stream != turn:
            out.append(Copy((), turn, 0, writes=(COMMUNICATOR,)))
            turn = op.stream
            out.append(Copy((), turn, 0, writes=(COMMUNICATOR,)))
        if isinstance(op, Gather):
            fresh.update(zip(op.units, op.slots, strict=True))
        if isinstance(op, Reduce):
            slots = tuple(("grad slot", 0, slot) for slot in op.grad_slots)
            out.append(Copy(op.units, "reduce", reduced(_size(trace, op.units)), reads=slots))
        if isinstance(op, Forward | Backward):
            new = tuple(unit for unit in trace.visits[op.visit].units if unit in fresh)
            slots = tuple(("slot", 0, fresh.pop(unit)) for unit in new)
            out.append(Copy(new, "compute", gathered(_size(trace, new)), reads=slots))
        out.append(op)
        if isinstance(op, Backward):
            trained = trace.visits[op.visit].trained
            slots = tuple(("grad slot", 0, slot) for slot in op.grad_slots)
            out.append(Copy(trained, "compute", computed(_size(trace, trained)), writes=slots))
    kept = [op for op in out if not isinstance(op, Copy) or op.nbytes or COMMUNICATOR in op.writes]
    return Program(trace, cast("tuple[Op, ...]", tuple(kept)))


def _fsdp(trace: Trace, remat: Remat) -> list[Op]:
    """Returns the ops of FSDP: layers are freed after their forward, the rest is one unit that stays."""
    if isinstance(remat, Offloading):
        raise ValueError(
            "ya.schedules.remat.offload: the peers' programs have no copies to the host; take remat.all or first(n)"
        )
    slots, recompute = alternating_slots(trace.visits, trace.units), remat(trace)
    used = dict.fromkeys(unit for visit in trace.visits for unit in visit.units)
    root = tuple(unit for unit in used if trace.units[unit].stack is None)
    ops: list[Op] = [Gather(root, tuple(slots[unit] for unit in root))] if root else []
    held = {slots[unit]: unit for unit in root}
    for i, now in enumerate(trace.order):
        visit, after = trace.visits[now.visit], trace.order[i + 1] if i + 1 < len(trace.order) else None
        window = [now, after] if after is not None and after.kind == "backward" else [now]
        ops += _gathers(trace, slots, held, window)
        at = tuple(slots[unit] for unit in visit.units)
        if now.kind == "forward":
            ops.append(Forward(visit.id, at, visit.id not in recompute, now.microbatch))
            held = {slot: unit for slot, unit in held.items() if slot not in at or unit in root}
            continue
        ops.append(Backward(visit.id, at, tuple(slots[unit] for unit in visit.trained), now.microbatch))
        last = after is None or after.microbatch != now.microbatch
        done = [(unit,) for unit in now.closes if unit not in root]
        trained = tuple(unit for unit in root if trace.units[unit].trainable)
        for units in [*done, *([trained] if last and trained else [])]:
            ops.append(Reduce(units, tuple(slots[unit] for unit in units)))
            if trace.replicas > 1 and now.microbatch + 1 == trace.microbatches:
                ops.append(AllReduce(units))
    return ops


def _gathers(trace: Trace, slots: dict[int, int], held: dict[int, int], window: list[Compute]) -> list[Op]:
    """Returns gathers of units that `window` needs and no slot holds, each into a slot that nothing before it in
    `window` reads."""
    ops: list[Op] = []
    busy: set[int] = set()
    for compute in window:
        for unit in trace.visits[compute.visit].units:
            slot = slots[unit]
            if held.get(slot) != unit:
                if slot in busy:
                    return ops
                ops.append(Gather((unit,), (slot,)))
                held[slot] = unit
            busy.add(slot)
    return ops
