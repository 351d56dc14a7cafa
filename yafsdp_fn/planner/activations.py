"""Counts the bytes that blocks need while a program runs, and finds where they are most.

    forward     holds its inputs and outputs and, if its graph is kept, what the graph saves inside
    backward    its own peak, or that of the recomputed forward; then it frees all of this, and its inputs
    in halves   the first half is like a backward; it keeps the factors of the weights' gradients for the second
    update      what the optimizer allocates

A value that several visits take, such as a rotary table, is held once. The carry of an offloaded visit is held until
its forward has copied it into a carry slot, or longer if something else holds it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from yafsdp_fn.program.ops import Backward, ComputeOp, Forward, Update
from yafsdp_fn.program.program import Program, after_program
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.util.mesh_axes import padded_numel

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BY_SIZE = {8: "float64", 4: "float32", 2: "bfloat16"}
"""The dtypes in which units are gathered and reduced, by their size: float16 is none of them."""


def shard_numel(trace: Trace, unit: UnitSpec) -> int:
    """Elements of one rank's shard of `unit`."""
    ranks = trace.ranks_of(unit)
    return padded_numel(unit.numel, ranks, unit.align) // ranks


def cast_bytes(trace: Trace, unit: UnitSpec) -> int:
    """Bytes that a gather reads and writes to cast one rank's shard of `unit`; none where a working copy is kept."""
    if len(trace.precision) < 5 or not unit.trainable or unit.gathered_as is not None:  # see `Precision.names`
        return 0
    numel = shard_numel(trace, unit)
    written = unit.gather_bytes // trace.ranks_of(unit)
    param = trace.precision[0]
    same = written == 0 or BY_SIZE.get(written // numel) == param
    return 0 if same else written + numel * ITEMSIZES[param]


def state_on_host(trace: Trace, unit: UnitSpec) -> int:
    """Bytes of one rank's optimizer state of `unit` that are on the host."""
    nbytes = dict(trace.optimizer.on_host).get(unit.id, 0)
    return shard_numel(trace, unit) * nbytes // trace.optimizer.block


class Peak(NamedTuple):
    """The memory that blocks need at an op. op: its number; the rest in bytes, as in `Memory`."""

    op: int
    activations: int
    logits: int
    workspace: int


class _Held(dict[tuple[int, int], int]):
    """(microbatch, number of a value or visit) -> bytes, and their `total`."""

    total = 0

    def put(self, key: tuple[int, int], nbytes: int) -> None:
        self.drop(key)
        self[key] = nbytes
        self.total += nbytes

    def drop(self, key: tuple[int, int]) -> None:
        self.total -= self.pop(key, 0)


def peak_of(program: Program) -> Peak:
    """Goes through the ops, and counts the memory that is held when each runs, and that it allocates itself."""
    trace = program.trace
    end = len(program.ops)
    last = len(trace.visits) - 1
    kept = _forwards(program, lambda op: op.keep)
    saved = _forwards(program, lambda op: op.carry_slot is not None)
    ends = {both: _ends(trace, *both) for both in {*zip(kept, saved, strict=True)}}
    values = _Held()
    grads = _Held()
    inner = _Held()  # of visits, with what the loss saved after them
    peaks: list[Peak] = []

    def offer(number: int, own: int, visit: int = -1) -> None:
        held = values.total + inner.total
        logits = own if visit == last else 0
        workspace = grads.total + own - logits
        peaks.append(Peak(min(number, end), held, logits, workspace))

    after = [] if program.has_updates else after_program(trace.trained, trace.lent)
    for number, op in enumerate((*program.ops, *after)):
        if isinstance(op, Update):
            offer(number, _of_update(trace, op.units))
        if not isinstance(op, ComputeOp):
            continue
        m = op.microbatch
        visit = op.visit
        cost = trace.visits[visit].cost
        taken = {value.number for value in cost.takes}
        gives = [value for value in cost.gives if value.number not in taken]
        given = sum(value.nbytes for value in gives)
        ended = ends[kept[m], saved[m]][type(op), visit]
        if isinstance(op, Forward):
            for value in cost.takes:
                values.put((m, value.number), value.nbytes)
            # without a graph it needs no more than its backward, which runs it again with more beside it
            offer(number, cost.peak_bytes if op.keep else given, visit)
            for value in gives:
                values.put((m, value.number), value.nbytes)
            graph = cost.inner_bytes * op.keep
            inner.put((m, visit), graph)
            offer(number, cost.beside_peak_bytes, visit)
            inner.put((m, visit), graph + cost.beside_bytes)
            for name in ended:
                values.drop((m, name))
        elif op.half == "weights":
            offer(number, 0)
            inner.drop((m, visit))
        else:
            inner.drop((m, visit))
            for value in cost.gives:
                grads.put((m, value.number), value.grad_bytes)
            own = cost.bwd_peak_bytes
            if visit not in kept[m]:  # its forward runs again first
                own = max(cost.peak_bytes, given + own)
            offer(number, own, visit)
            for value in cost.gives:
                grads.drop((m, value.number))
            for value in cost.takes:
                grads.put((m, value.number), value.grad_bytes)
            for name in ended:
                values.drop((m, name))
                grads.drop((m, name))
            if op.half == "inputs":
                inner.put((m, visit), cost.between_bytes)
    return max(peaks, key=lambda peak: sum(peak[1:]))


def _of_update(trace: Trace, units: Iterable[int]) -> int:
    """Returns the bytes that an update of `units` allocates."""
    nbytes, elements = trace.optimizer.step
    numels = [shard_numel(trace, trace.units[unit]) for unit in units]
    one_by_one = trace.optimizer.block > 1 or trace.optimizer.on_host
    numel = max(numels, default=0) if one_by_one else sum(numels)
    return nbytes * numel // elements


def _forwards(program: Program, which: Callable[[Forward], bool]) -> list[frozenset[int]]:
    """Returns the visits of such forwards by microbatch: those that keep their graphs, or that save carries in carry
    slots."""
    found: list[set[int]] = [set() for _ in range(program.trace.microbatches)]
    for op in program.ops:
        if isinstance(op, Forward) and which(op):
            found[op.microbatch].add(op.visit)
    return [frozenset(those) for those in found]


def _ends(trace: Trace, kept: frozenset[int], saved: frozenset[int]) -> dict[tuple[type, int], list[int]]:
    """Maps each compute, `(Forward or Backward, visit)`, to the values that nothing holds any more after it.

    A value ends with the backward of the first visit that holds it, since backwards run from the last visit to the
    first; if none does, with the forward of the last that uses it.
    """
    users: dict[int, int] = {}
    for visit in trace.visits:
        for value in (*visit.cost.gives, *visit.cost.takes):
            users[value.number] = visit.id
    ends: defaultdict[tuple[type, int], list[int]] = defaultdict(list)
    holders = _holders(trace, kept, saved)
    for number, last in users.items():
        if number in holders:
            ends[Backward, min(holders[number])].append(number)
        else:
            ends[Forward, last].append(number)
    return ends


def _holders(trace: Trace, kept: frozenset[int], saved: frozenset[int]) -> dict[int, list[int]]:
    """Value -> the visits that hold it until their backward: that have it in the graph they keep, or that save what
    they take, to run again. What nobody takes and no graph is known to leave out is held by the visit that gave it."""
    # the last visits of segments whose values go to other stages
    leaving = {trace.cut.visits(flow.source)[-1] for flow in trace.cut.flows}
    holders: defaultdict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for visit in trace.visits:
        cost = visit.cost
        keeps = visit.id in kept
        for value in cost.takes:
            seen.add(value.number)
            in_slot = visit.id in saved and value.number in cost.carries
            free = value.number in cost.unsaved if keeps else in_slot
            if not free:
                holders[value.number].append(visit.id)
        for value in cost.gives:
            alone = value.number not in seen and visit.id not in leaving
            seen.add(value.number)
            if value.number not in cost.unsaved and (keeps or alone):
                holders[value.number].append(visit.id)
    return holders


def always_held(trace: Trace) -> int:
    """Returns the bytes of values that every program holds between the last forward of a microbatch and its first
    backward: neither in graphs that it may drop, nor carries that it may offload."""
    held: dict[int, int] = {}
    for visit in trace.visits:
        for value in visit.cost.takes:
            if value.number not in visit.cost.unsaved and value.number not in visit.cost.carries:
                held[value.number] = value.nbytes
    return sum(held.values())
