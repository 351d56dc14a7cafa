"""Predicted memory of one rank: what the toolkit holds, to the byte, and what blocks need, at the op where it is most.

    held by the state and its slots      master, optimizer, working copy, gradient shards, slots, buffers of collectives
    for op in program:                   activations: what is saved for a backward that has not run
        most(held + op's own)            logits: the last visit's own; workspace: any other visit's, and gradients

The first step runs on demand and holds other slots for a while; this is every later one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from yafsdp_fn.comm import flat
from yafsdp_fn.comm.local_sum import CHUNK
from yafsdp_fn.layout import padded_numel
from yafsdp_fn.mesh import SHARD, places
from yafsdp_fn.precision import DEFAULT_PRECISION, Precision
from yafsdp_fn.schedules.ops import AllReduce, Backward, Forward, Reduce, describe
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.trace import Trace, Visit

SHARDED = ("master", "optimizer", "working_copy", "grad_shards")
"""Items that shrink with the number of ranks."""

ADVICE = {
    "master": "more ranks, or a narrower Precision.param",
    "optimizer": "more ranks, or an optimizer with fewer moments",
    "working_copy": "more ranks, or Precision.compute equal to param",
    "grad_shards": "more ranks",
    "weight_slots": "a schedule that keeps fewer units resident, or less prefetch",
    "grad_slots": "a schedule that reduces sooner, or a narrower Precision.reduce",
    "secondary": "no hpz",
    "receive": "Precision.accumulate=None",
    "staging": "Precision.accumulate=None",
    "activations": "more recomputation (ya.remat.all), more microbatches or a smaller batch",
    "logits": "a head in chunks (ya.chunk), more microbatches or a smaller batch",
    "workspace": "blocks in chunks (ya.chunk), more microbatches or a smaller batch",
}
"""What makes an item smaller."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the op of a step at which they are most.

    master, optimizer, working_copy, grad_shards: this rank's shards; working_copy: 0 where compute and param are one
    weight_slots, grad_slots, secondary: 0 where they alias the shards; receive, staging: buffers that reductions over
        shards and over replicas go through, with the scratch of sums in a wider dtype
    activations: saved for backwards to come; logits: what the last visit has allocated, if the peak lies in it;
    workspace: what any other visit has, and gradients on their way between visits
    op: number of the op at the peak; at: that op in words
    """

    master: int
    optimizer: int
    working_copy: int
    grad_shards: int
    weight_slots: int
    grad_slots: int
    secondary: int
    receive: int
    staging: int
    activations: int
    logits: int
    workspace: int
    op: int
    at: str
    ranks: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.itemised().values())

    @property
    def held_bytes(self) -> int:
        """What the state, its slots and buffers hold all the time."""
        return self.peak_bytes - self.activations - self.logits - self.workspace

    def itemised(self) -> dict[str, int]:
        """Item -> bytes."""
        return {name: getattr(self, name) for name in ADVICE}

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """The largest items, in order."""
        items = sorted(self.itemised().items(), key=lambda item: -item[1])
        return [item for item in items[:count] if item[1]]

    def why_not(self, budget: int) -> str | None:
        """None where the peak is within `budget` bytes; else which items are too large, and what would fit."""
        if self.peak_bytes <= budget:
            return None
        largest = "; ".join(f"{_words(name)} {_gib(size)}: {ADVICE[name]}" for name, size in self.largest())
        text = f"needs {_gib(self.peak_bytes)} on each rank, {_gib(self.peak_bytes - budget)} more than {_gib(budget)}"
        sharded = sum(getattr(self, name) for name in SHARDED)
        left = budget - (self.peak_bytes - sharded)
        if left <= 0:
            alone = f"on any number of ranks: all that is not cut over ranks is {_gib(self.peak_bytes - sharded)}"
            return f"{text}, and would not fit {alone}. Largest: {largest}"
        return f"{text}. A shard group of {math.ceil(self.ranks * sharded / left)} ranks would fit. Largest: {largest}"

    def __str__(self) -> str:
        peak = max(self.peak_bytes, 1)
        rows = [f"{_words(name):<14} {_gib(size):>12} {size / peak:>6.1%}" for name, size in self.itemised().items()]
        return "\n".join([*rows, f"{'peak':<14} {_gib(self.peak_bytes):>12}  at op {self.op}: {self.at}"])


def memory(
    program: Program, *, precision: Precision = DEFAULT_PRECISION, optimizer: int = 0, device: str = "cuda"
) -> Memory:
    """The memory of one rank in a step of `program`; its ranks need not exist.

    precision: of the trace; optimizer: bytes of the optimizer's state, as `plan.trace.optimizer_bytes` finds them
    device: the type it runs on, whose sums take scratch of another size

    What torch's allocator rounds up or leaves unused between blocks, libraries' workspaces and contexts are not in it,
    nor what an optimizer without a fused kernel allocates. Raises ValueError for a trace without costs, and for
    another precision than the trace's.
    """
    trace = program.trace
    _check(trace, precision)
    receive, staging = _buffers(program, precision, device)
    op, activations, logits, workspace = _peak(program)
    ranks, master, param = trace.ranks, 0, precision.param.itemsize
    trained = [padded_numel(unit.numel, ranks) // ranks for unit in trace.units if unit.trainable]
    master = sum(trained) * param + sum(unit.gather_bytes for unit in trace.units if not unit.trainable) // ranks
    computes = iter(trace.order)
    microbatches = [next(computes).microbatch for done in program.ops[: op + 1] if isinstance(done, Forward | Backward)]
    return Memory(
        master=master,
        optimizer=optimizer,
        working_copy=0 if precision.gather_dtype == precision.param else sum(trained) * precision.gather_dtype.itemsize,
        grad_shards=sum(trained) * param,
        weight_slots=0 if ranks == 1 else sum(program.slot_bytes().values()),
        grad_slots=0 if _grads_alias(trace, precision) else sum(program.grad_slot_bytes().values()),
        secondary=0 if ranks == 1 else sum(program.secondary_bytes().values()),
        receive=receive,
        staging=staging,
        activations=activations,
        logits=logits,
        workspace=workspace,
        op=op,
        at=describe(program.ops[op], trace, microbatches[-1]),
        ranks=ranks,
    )


def _check(trace: Trace, precision: Precision) -> None:
    if not any(visit.gives for visit in trace.visits):
        raise ValueError(
            "the trace has no costs: it was learnt from a real step, which measures none. Take it from ya.trace, or "
            "from step.trace or step.lower before the first step"
        )
    for unit in trace.units:
        padded = padded_numel(unit.numel, trace.ranks)
        expected = (padded * precision.gather_dtype.itemsize, padded * precision.reduce_dtype.itemsize)
        if unit.trainable and (unit.gather_bytes, unit.reduce_bytes) != expected:
            raise ValueError(
                f"{unit.name}: gathered and reduced are {unit.gather_bytes} and {unit.reduce_bytes} bytes, with "
                f"{precision} they would be {expected[0]} and {expected[1]}: give the precision of the trace"
            )


def _grads_alias(trace: Trace, precision: Precision) -> bool:
    return trace.ranks == 1 and precision.reduce_dtype == precision.param


def _buffers(program: Program, precision: Precision, device: str) -> tuple[int, int]:
    """Bytes of what reductions over shards and over replicas go through: see `Store.receive`, `comm.flat`."""
    trace, wire, wide = program.trace, precision.reduce_dtype, precision.sum_dtype
    mesh = trace.mesh if len(trace.mesh) > 1 else ((SHARD, trace.ranks),)
    comms = places(mesh, torch.device(device))
    n = max((padded_numel(u.numel, trace.ranks) // trace.ranks for u in trace.units if u.trainable), default=0)
    added = False
    touched: set[int] = set()
    for op in program.ops:
        if isinstance(op, Reduce):
            added |= not touched.isdisjoint(op.units)
            touched.update(op.units)
    receive = staging = 0
    if touched and not _grads_alias(trace, precision):
        if added or wide is not None or wire != precision.param:
            receive = flat.receive_numel(comms, n, wide) * wire.itemsize
        if added or (wide is not None and comms.ranks > 1):
            receive += _scratch(wide or torch.promote_types(wire, precision.param), device)
    if comms.replicas > 1 and any(isinstance(op, AllReduce) for op in program.ops):
        staging = flat.staging_numel(comms, n, precision.param, wire, wide) * wire.itemsize
        staging += 0 if wide is None else _scratch(wide, device)
    return receive, staging


def _scratch(dtype: torch.dtype, device: str) -> int:
    return 2 * CHUNK[device] * dtype.itemsize


Memo = dict[tuple[int, int], int]
"""(microbatch, number of a value or visit) -> bytes"""


class Peak(NamedTuple):
    """op: its number; the rest in bytes, as in `Memory`."""

    op: int
    activations: int
    logits: int
    workspace: int


def _peak(program: Program) -> Peak:
    """Walks the ops: what is held when each runs, and what it has allocated itself."""
    visits = program.trace.visits
    kept = {op.visit for op in program.ops if isinstance(op, Forward) and op.keep}
    last_use = _last_uses(visits, kept)
    held: Memo = {}  # values
    inner: Memo = {}  # of visits, with what the loss saved after them
    grads: Memo = {}  # of values
    best, most = Peak(0, 0, 0, 0), -1
    computes = iter(program.trace.order)

    def offer(number: int, visit: Visit, own: int) -> None:
        nonlocal best, most
        saved, between = sum(held.values()) + sum(inner.values()), sum(grads.values())
        if saved + between + own > most:
            most, last = saved + between + own, visit is visits[-1]
            best = Peak(number, saved, own * last, between + own * (not last))

    for number, op in enumerate(program.ops):
        if not isinstance(op, Forward | Backward):
            continue
        m, visit = next(computes).microbatch, visits[op.visit]
        taken = {value.number for value in visit.takes}
        gives = {(m, value.number): value.nbytes for value in visit.gives if value.number not in taken}
        if isinstance(op, Forward):
            held.update({(m, value.number): value.nbytes for value in visit.takes})
            # without a graph it needs no more than its backward, which runs it again with more beside it
            offer(number, visit, visit.peak_bytes if op.keep else sum(gives.values()))
            held.update(gives)
            inner[m, visit.id] = visit.inner_bytes * op.keep
            offer(number, visit, visit.beside_peak_bytes)
            inner[m, visit.id] += visit.beside_bytes
            continue
        del inner[m, visit.id]
        grads.update({(m, value.number): value.grad_bytes for value in visit.gives})
        again = 0 if visit.id in kept else sum(gives.values())
        offer(number, visit, max(again + visit.bwd_peak_bytes, 0 if visit.id in kept else visit.peak_bytes))
        for value in visit.gives:
            grads.pop((m, value.number), None)
        grads.update({(m, value.number): value.grad_bytes for value in visit.takes})
        for value in last_use.get(visit.id, ()):
            held.pop((m, value), None)
            grads.pop((m, value), None)
    return best


def _last_uses(visits: tuple[Visit, ...], kept: set[int]) -> dict[int, list[int]]:
    """Visit -> the values that nothing needs after its backward. Backwards run from the last visit to the first: a
    value is needed until that of the first visit that takes it, or of the one that gives it where that keeps its graph.
    """
    until: dict[int, int] = {}
    for visit in reversed(visits):
        until.update({value.number: visit.id for value in visit.gives if visit.id in kept or value.number not in until})
        until.update({value.number: visit.id for value in visit.takes})
    out: dict[int, list[int]] = {}
    for value, visit_id in until.items():
        out.setdefault(visit_id, []).append(value)
    return out


def _words(name: str) -> str:
    return name.replace("_", " ").replace("grad ", "gradient ")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"
