"""Predicts the memory of one rank: the toolkit's buffers to the byte, and the needs of blocks."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from yafsdp_fn.communication.ranks import CHUNK, Ranks, absent_ranks, receive_numel, staging_numel
from yafsdp_fn.planner.activations import BY_SIZE, ITEMSIZES, cast_bytes, peak_of, shard_numel, state_on_host
from yafsdp_fn.planner.costs import NO_COSTS
from yafsdp_fn.program.ops import AllReduce, Reduce
from yafsdp_fn.program.program import Program, must_be_program
from yafsdp_fn.program.text import describe
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.util.mesh_axes import SHARD

# ---- Memory at the op where it is most.
#
#     held by the state and its slots      master, optimizer, working copy, gradient shards, slots, collectives' buffers
#     for op in program:                   activations: what is saved for a backward that has not run
#         most(held + op's own)            logits: the last visit's own; workspace: any other visit's, and gradients
#
# Before the first step, while a call is recorded, there are other buffers for a while.

SHARDED = ("master", "optimizer", "working_copy", "grad_shards")
"""Items that shrink with the number of ranks."""

ADVICE = {
    "master": "more ranks, or a narrower Precision.param",
    "optimizer": "more ranks, an optimizer with fewer moments, or ya.optim.on_host",
    "working_copy": "Precision(copy=False), more ranks, or Precision.compute equal to param",
    "grad_shards": "more ranks",
    "weight_slots": "a schedule that keeps fewer units resident, or less prefetch",
    "grad_slots": "a schedule that reduces sooner, or a narrower Precision.reduce",
    "secondary": "no hpz",
    "carry_slots": "a smaller ahead in ya.schedules.remat.offload, or fewer segments a stage",
    "receive": "Precision.accumulate=None",
    "staging": "Precision.accumulate=None",
    "scratch": "Precision.reduce equal to compute",
    "activations": "more recomputation (ya.schedules.remat.all, or ya.schedules.remat.offload), more microbatches or a "
    "smaller batch",
    "logits": "ya.linear_cross_entropy as the head's loss, more microbatches or a smaller batch",
    "workspace": "blocks in chunks (ya.chunk), more microbatches or a smaller batch",
}
"""Ways to make each item smaller."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the op of a step at which they are most.

    master, optimizer, working_copy, grad_shards: this rank's shards; working_copy: 0 where compute and param are one
    weight_slots, grad_slots, secondary: 0 where they alias the shards; carry_slots: for
        the carries of offloaded visits, and for messages; receive, staging: buffers of reductions over shards and over
        replicas, with the scratch of sums in a wider dtype; scratch: for products on their way to gradient slots of
        another dtype
    activations: saved for backwards to come; logits: what the last visit has allocated, if the peak lies in it;
    workspace: what any other visit has, or the optimizer, and gradients on their way between visits
    op: number of the op at the peak; at: that op in words
    ranks: of the shard group; aliased: slots that cost nothing, since one rank has all of a unit
    host: bytes of the host's memory, pinned where the device is a GPU; in no other figure

    >>> memory = ya.planner.predict_memory(program)
    >>> memory.master, memory.weight_slots, memory.at
    (4608, 5120, 'backward layers[3] in slot 1 -> grad slot 1')
    """

    master: int
    optimizer: int
    working_copy: int
    grad_shards: int
    weight_slots: int
    grad_slots: int
    secondary: int
    carry_slots: int
    receive: int
    staging: int
    scratch: int
    activations: int
    logits: int
    workspace: int
    op: int
    at: str
    ranks: int
    aliased: int
    host: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.itemised().values())

    @property
    def held_bytes(self) -> int:
        """Bytes that the state, its slots and buffers hold all the time."""
        return self.peak_bytes - self.activations - self.logits - self.workspace

    def itemised(self) -> dict[str, int]:
        """Item -> bytes."""
        return {name: getattr(self, name) for name in ADVICE}

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """Returns the largest items, in order."""
        items = sorted(self.itemised().items(), key=lambda item: -item[1])
        return [item for item in items[:count] if item[1]]

    def why_not(self, budget: int) -> str | None:
        """None where the peak is within `budget` bytes; else which items are too large, and what would fit."""
        if self.peak_bytes <= budget:
            return None
        largest = "; ".join(f"{words(name)} {_sized(size)}: {ADVICE[name]}" for name, size in self.largest())
        over = _sized(self.peak_bytes - budget)
        text = f"needs {_sized(self.peak_bytes)} on each rank, {over} more than {_sized(budget)}"
        sharded = sum(getattr(self, name) for name in SHARDED)
        rest = self.peak_bytes - sharded + self.aliased
        if rest >= budget:
            alone = f"on any number of ranks: all that is not cut over ranks is {_sized(rest)}"
            return f"{text}, and would not fit {alone}. Largest: {largest}"
        ranks = math.ceil(self.ranks * sharded / (budget - rest))
        return f"{text}. A shard group of {ranks} ranks would fit. Largest: {largest}"

    def __str__(self) -> str:
        peak = self.peak_bytes
        rows = [(words(name), size, f" {size / peak:>6.1%}") for name, size in self.itemised().items() if size]
        rows.append(("peak", peak, f"  at op {self.op}: {self.at}"))
        if self.host:
            rows.append(("on the host", self.host, ""))
        return "\n".join(f"{name:<15} {_sized(size):>12}{more}" for name, size, more in rows)


def predict_memory(program: Program, *, device: str = "cuda") -> Memory:
    """Returns the memory of one rank in a step of `program`, whose ranks need not exist; of the stage that takes most.

    Of each stage: `[predict_memory(part) for part in program.by_stage]`.

    device: the type it runs on. Sums and products in two dtypes take scratch on the CPU, and none on a GPU with Triton

    Not counted: the waste of torch's allocator, the memory that kernels allocate for themselves (libraries'
    workspaces; on the CPU, sums of two dtypes), NCCL's, and contexts.

    Raises ValueError for a trace without costs.

    >>> ya.planner.predict_memory(program).peak_bytes
    49152
    """
    must_be_program(program, "predict_memory")
    if program.by_stage != (program,):
        return max((predict_memory(part, device=device) for part in program.by_stage), key=lambda each: each.peak_bytes)
    trace = program.trace
    if not trace.precision:
        raise ValueError(NO_COSTS)
    dtypes = _dtypes(trace)
    comms = absent_ranks(trace.mesh if len(trace.mesh) > 1 else ((SHARD, trace.ranks),))
    if trace.ordered:
        comms.set_micro_shards(trace.microbatches * comms.world)
    peak = peak_of(program)
    alias, grads_alias = _aliases(trace, dtypes)
    receive, staging = _buffers(program, dtypes, grads_alias, comms, device)
    scratch = 0
    if not all(own.compute == own.reduce or own.multiplied_wider(device) for own in dtypes.values()):
        scratch = max((visit.cost.scratch_bytes for visit in trace.visits), default=0)
    slots = sum(program.slot_bytes(alias).values())
    grad_slots = sum(program.grad_slot_bytes(grads_alias).values())
    secondary = sum(nbytes for unit, nbytes in program.secondary_bytes().items() if unit not in alias)
    all_slots = sum(program.slot_bytes().values()) + sum(program.grad_slot_bytes().values())
    return Memory(
        **state_bytes(trace),
        weight_slots=slots,
        grad_slots=grad_slots,
        secondary=secondary,
        carry_slots=sum(program.carry_slot_bytes().values()),
        receive=receive,
        staging=staging,
        scratch=scratch,
        **peak._asdict(),
        at="the optimizer's step" if peak.op == len(program.ops) else describe(program.ops[peak.op], trace),
        ranks=trace.ranks,
        aliased=all_slots - slots - grad_slots,
        host=sum(program.host_bytes().values()) + sum(state_on_host(trace, unit) for unit in trace.units),
    )


def state_bytes(trace: Trace) -> dict[str, int]:
    """Returns the items of `Memory` that are shards, which no schedule changes: those of `SHARDED`."""
    dtypes = _dtypes(trace)
    trained = frozen = copies = 0
    of_size: dict[tuple[int, int], int] = {}  # elements of a unit and parts it is split into -> those of its shard
    for unit in trace.units:
        of_size[unit.numel, trace.ranks // trace.ranks_of(unit)] = shard_numel(trace, unit)
    of_states = [of_size.get((numel, parts), 0) * nbytes for numel, nbytes, parts in trace.optimizer.shards]
    largest_on_host = max((state_on_host(trace, unit) for unit in trace.units), default=0)
    for unit in trace.units:
        gathered = unit.gather_bytes // trace.ranks_of(unit)
        encoded = 0 if unit.gathered_as is None else unit.gathered_as.nbytes // trace.ranks_of(unit)
        if unit.id not in dtypes:
            frozen += gathered
            copies += encoded
            continue
        own = dtypes[unit.id]
        trained += shard_numel(trace, unit) * own.param.itemsize
        copies += encoded or (gathered if own.compute != own.param and not cast_bytes(trace, unit) else 0)
    return {
        "master": trained + frozen,
        "optimizer": trace.optimizer.fixed + sum(of_states) // trace.optimizer.block + 2 * largest_on_host,
        "working_copy": copies,
        "grad_shards": trained,
    }


class NamedDtype(NamedTuple):
    """A dtype by its name, as traces have it; torch is not asked."""

    name: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.name]

    def promoted(self, other: "NamedDtype") -> "NamedDtype":
        """Returns the dtype that holds what both do, as `torch.promote_types`."""
        if self.itemsize == other.itemsize and self != other:
            return NamedDtype("float32")
        return max(self, other, key=lambda each: each.itemsize)


class Dtypes(NamedTuple):
    """The dtypes of a trained unit. wide: of sums that ranks make themselves, `Placement.sum_dtype`"""

    param: NamedDtype
    compute: NamedDtype
    reduce: NamedDtype
    wide: NamedDtype | None

    def multiplied_wider(self, device: str) -> bool:
        """Tells whether one kernel makes gradients of weights, as `nn.linear.multiplies_wider`."""
        return device == "cuda" and self.reduce.name == "float32" and self.compute.itemsize == 2


def _dtypes(trace: Trace) -> dict[int, Dtypes]:
    """Returns the dtypes of each trained unit. Raises ValueError for a precision that is none."""
    needed = trace.precision[:3]
    last = trace.precision[3:4]
    if len(last) != 1 or not {*needed, last[0] or "float32"} <= ITEMSIZES.keys():
        raise ValueError(f"trace.precision: expected 3 or 4 of {', '.join(ITEMSIZES)}, got {trace.precision!r:.200}")
    param, compute, reduce, accumulate = map(NamedDtype, trace.precision[:4])
    found: dict[int, Dtypes] = {}
    for unit in trace.units:
        if unit.trainable:
            numel = max(shard_numel(trace, unit) * trace.ranks_of(unit), 1)
            gathered = NamedDtype(BY_SIZE.get(unit.gather_bytes // numel, compute.name))
            wire = NamedDtype(BY_SIZE.get(unit.reduce_bytes // numel, reduce.name))
            wide = accumulate if accumulate.name and accumulate.itemsize > wire.itemsize else None
            if unit.reduced_as is not None:
                wide = NamedDtype(BY_SIZE[unit.sum_bytes // numel])
            found[unit.id] = Dtypes(param, gathered, wire, wide)
    return found


def _aliases(trace: Trace, dtypes: dict[int, Dtypes]) -> tuple[frozenset[int], frozenset[int]]:
    """Returns `Placement.weights_alias` and `grads_alias`: units whose slots are the shards, since one rank has all of
    their vector."""
    weights: set[int] = set()
    grads: set[int] = set()
    for unit in trace.units:
        arrives = unit.gathered_as is not None or cast_bytes(trace, unit)
        if trace.ranks_of(unit) > 1 or trace.ordered or arrives:
            continue
        weights.add(unit.id)
        own = dtypes.get(unit.id)
        if own is not None and own.reduce == own.param and unit.reduced_as is None:
            grads.add(unit.id)
    return frozenset(weights), frozenset(grads)


def _buffers(
    program: Program, dtypes: dict[int, Dtypes], alias: Collection[int], comms: Ranks, device: str
) -> tuple[int, int]:
    """Returns the bytes of what reductions over shards and over replicas go through: see `Memory.receive`. alias: units
    that nothing reduces, since gradient slots are the shards"""
    trace = program.trace
    reduced = Counter(unit for op in program.ops if isinstance(op, Reduce) for unit in op.units)
    scratch: set[NamedDtype] = set()  # of sums
    replicated: set[NamedDtype] = set()  # of sums over replicas
    receive = staging = 0
    straight = True
    for unit, (param, _, wire, summed) in dtypes.items():
        wide = param.promoted(wire) if comms.deterministic else summed
        times = 0 if unit in alias else reduced[unit]
        spec = trace.units[unit]
        numel = shard_numel(trace, spec)
        sent = spec.reduce_wire // trace.ranks_of(spec)
        receive = max(receive, receive_numel(comms.without(spec.over), sent, wide))
        staging = max(staging, staging_numel(comms, numel, param, wire, wide) * wire.itemsize)
        if times > 1 or (times and wide is not None and (comms.deterministic or comms.ranks > 1)):
            scratch.add(wide or wire.promoted(param))
        straight &= times == 0 or (times == 1 and wide is None and wire == param)
        if wide is not None:
            replicated.add(wide)
    receive = _scratch(scratch, device) + (0 if straight else receive)
    sums = comms.replicas > 1 and any(isinstance(op, AllReduce) for op in program.ops)
    return receive, staging + _scratch(replicated, device) if sums else 0


def _scratch(dtypes: set[NamedDtype], device: str) -> int:
    """Returns the bytes of scratch of sums in these dtypes, which a kernel of Triton's does without."""
    return 0 if device == "cuda" else 2 * CHUNK[device] * sum(dtype.itemsize for dtype in dtypes)


def words(item: str) -> str:
    """Returns an item of `Memory` as people read it."""
    return item.replace("_", " ").replace("grad ", "gradient ")


def gib(nbytes: int) -> str:
    """Returns bytes as a number of GiB."""
    return f"{nbytes / 2**30:.1f}"


def _sized(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"
